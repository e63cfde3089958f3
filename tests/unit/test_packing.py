"""Packed weights: the same products, of the weights as they are now, without keeping dead ones."""

from __future__ import annotations

import gc

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F

from tlt_pipeline.engine.cache import KVCache
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.forward import Forward, prefill_features
from tlt_pipeline.engine.layout import PLAIN, RangeLinear, plain_layout
from tlt_pipeline.engine.packing import PackedLinear, can_pack, packed_linear
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, initialize

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
needs_packing = pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="oneDNN has no bfloat16 here")


def wide_policy(dtype: torch.dtype, seed: int = 0) -> Decoder:
    """Wide enough for float32 weights to be packed."""
    config = DecoderConfig(
        vocab_size=cases.tokenizer().vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=256,
    )
    model = Decoder(config)
    initialize(model, torch.Generator().manual_seed(seed), std=0.08)
    return model.to(dtype).requires_grad_(False)


@torch.inference_mode()
def logits(policy: Decoder, layout) -> torch.Tensor:
    forward = Forward(policy, layout)
    weight = policy.embed.weight
    cache = KVCache(policy.config, 1, 64, weight.dtype, weight.device)
    return forward.logits(prefill_features(forward, cache, [list(range(2, 30))], 0)[0])


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 17])
def test_product_is_that_of_the_weight(dtype, rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 384, generator=generator).to(dtype)
    weight = torch.randn(512, 384, generator=generator).to(dtype)
    bias = torch.randn(512, generator=generator).to(dtype)
    product = PackedLinear()
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(product(x, weight, bias), F.linear(x, weight, bias), **tolerance)
    torch.testing.assert_close(product(x, weight, None), F.linear(x, weight), **tolerance)
    assert product.packed(weight)


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_weights_and_weights_changed_in_place_are_packed_anew(dtype):
    policy, other = wide_policy(dtype), wide_policy(dtype, seed=1)
    layout = plain_layout(policy)
    tolerance = {"rtol": 5e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}

    def check(model: Decoder) -> torch.Tensor:
        packed = logits(model, layout)
        torch.testing.assert_close(packed, logits(model, PLAIN), **tolerance)
        return packed

    first, second = check(policy), check(other)
    assert not torch.allclose(first, second, **tolerance), "the policies differ, or this tests nothing"
    with torch.no_grad():
        for mine, theirs in zip(policy.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    assert torch.equal(check(policy), second)
    policy.load_state_dict(wide_policy(dtype).state_dict())
    assert torch.equal(check(policy), first)
    with torch.inference_mode():
        policy.layers[1].down.weight.mul_(1.5)
    assert not torch.equal(check(policy), first)


@needs_packing
def test_copies_go_with_their_weights():
    product = PackedLinear()
    policy = wide_policy(torch.bfloat16)
    product.prepare(policy)
    assert len(product) == 4 * 2 + 1
    product.prepare(policy)
    assert len(product) == 4 * 2 + 1
    del policy
    gc.collect()
    assert len(product) == 0


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_engines_on_packed_weights_agree(dtype):
    model = wide_policy(dtype)
    requests = [cases.request(number) for number in range(6)]
    engine = cases.engine(model, batch=6, depth=5)
    assert isinstance(engine.layout.linear, RangeLinear)
    assert engine.layout.linear.product is packed_linear
    assert packed_linear.packed(model.layers[0].gate_up.weight)
    engine.set_drafter(cases.drafter(model), 1)
    together = [done.tokens for done in decode_all(engine, requests)]
    alone = [decode_all(cases.engine(model, batch=1), [request])[0].tokens for request in requests]
    assert together == alone


def test_what_cannot_be_packed_is_computed_as_before():
    assert not can_pack(torch.float64, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))
    assert plain_layout(wide_policy(torch.float64)) == PLAIN
    assert plain_layout(cases.policy()) == PLAIN
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    product = PackedLinear()
    assert torch.equal(product(x, weight, None), F.linear(x, weight))
    assert not product.packed(weight), "a small float32 weight stays as it is"
