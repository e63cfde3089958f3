"""The start-up check sees a sum in another order, in bfloat16 too, where ordinary inputs hide it."""

from __future__ import annotations

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F

from tlt_pipeline.engine.forward import Forward
from tlt_pipeline.engine.invariance import is_batch_invariant, usable_lengths
from tlt_pipeline.engine.layout import Layout, exact_layouts

DTYPES = [torch.float32, torch.bfloat16]


class Backwards:
    """A product that sums from the other end when there are seven rows."""

    def padded(self, rows: int) -> int:
        return max(rows, 4)

    def __call__(self, x, weight, bias):
        if x.shape[0] == 7:
            x, weight = x.flip(-1), weight.flip(-1)
        return F.linear(x, weight, bias)


def invariant_layout(model) -> Layout:
    return next(layout for layout in exact_layouts(model) if is_batch_invariant(Forward(model, layout)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_that_sums_in_another_order_at_one_row_count(dtype):
    assert not is_batch_invariant(Forward(cases.policy(dtype=dtype), Layout(Backwards(), queries=4)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kv_length_at_which_attention_sums_in_another_order_is_passed_over(dtype, monkeypatch):
    model, attend = cases.policy(dtype=dtype), F.scaled_dot_product_attention
    layout = invariant_layout(model)
    assert 128 in usable_lengths(model, layout, 256)

    def backwards_at_128(q, k, v, attn_mask):
        if k.shape[2] == 128:
            k, v, attn_mask = k.flip(2), v.flip(2), attn_mask.flip(-1)
        return attend(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", backwards_at_128)
    lengths = usable_lengths(model, layout, 256)
    assert 128 not in lengths
    assert 64 in lengths
