"""Shapes: N = rows, V = vocabulary."""

from __future__ import annotations

from torch import Tensor

from tlt_pipeline.engine import noise


def gumbel_noise(keys_N2: Tensor, hashes_V: Tensor) -> Tensor:
    """Two int32 keys a row, the token ids' int32 hashes -> float32 [N, V]."""
    return noise.gumbel_noise(keys_N2, hashes_V)
