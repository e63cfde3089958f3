"""Shapes: N = rows, V = vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tlt_pipeline.engine import sampling
from tlt_pipeline.engine.noise import gumbel_noise
from tlt_pipeline.engine.sampling import Draw, RowSampling


class Border(NamedTuple):
    """What filters keep of each row: scaled logits above the value, and those equal to it up to the token id."""

    values_N: Tensor
    last_ids_N: Tensor
    """int32."""


def draw(logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, row_sampling: RowSampling) -> Draw:
    return sampling.draw(logits_NV, gumbel_noise(keys_N2, hashes_V), row_sampling)


def filter_border(scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Border:
    """Filters keep a prefix of the tokens in the order of their logits, lower ids first among equals
    (`sampling.filter_logits`), so the prefix's last token says all. It is read off the filter's own result: what is
    kept here and there can't differ. This sorts the vocabulary, for batches with filters only."""
    kept_NV = sampling.filter_logits(scaled_NV, top_k_N, top_p_N)
    lowest_N1 = kept_NV.masked_fill(kept_NV.isneginf(), float("inf")).amin(-1, keepdim=True)
    ids_V = torch.arange(kept_NV.shape[-1], dtype=torch.int32, device=kept_NV.device)
    last_ids_N = torch.where(kept_NV == lowest_N1, ids_V, -1).amax(-1)
    return Border(lowest_N1.squeeze(-1).float(), last_ids_N)
