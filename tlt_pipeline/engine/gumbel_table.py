"""The Gumbel quantile function as a table, so that its bits are the same wherever it is read.

Logarithms differ in their last bits between libraries and devices; a look-up, one product and one sum (each rounded,
not fused) don't. The argument is a signed 32-bit integer x, uniform: x >= 0 stands for u = (x + 1/2) / 2^32, x < 0 for
1 - u = (-x - 1/2) / 2^32. So x is near 0 in both tails, where its float32 is finest. That float's sign, exponent and
first 8 bits of mantissa choose a segment, and within it -log(-log1p(-u)) is a + b * x to 1e-6, about the spacing of
float32 where winners lie.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHIFT = 15
"""Bits of a float32 that don't choose the segment."""
SEGMENTS = 1 << (32 - SHIFT)


@functools.cache
def gumbel_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """a and b of each segment, float32 [SEGMENTS] each, once a device. Segments that no integer reaches hold 0."""
    edges = np.arange(SEGMENTS + 1, dtype=np.uint64) << SHIFT
    low, high = (edges[part].astype(np.uint32).view(np.float32) for part in (slice(-1), slice(1, None)))
    used = (np.abs(low) >= 1) & (np.abs(low) <= 2.0**31)
    # in the widest float there is, so that no library's last bits survive the rounding to float32
    low, high = low[used].astype(np.longdouble), high[used].astype(np.longdouble)
    b = (_quantile(high) - _quantile(low)) / (high - low)
    middle = (low + high) / 2
    # halfway between the chord and the parallel tangent, where the largest error is the smallest
    a = (_quantile(low) - b * low + _quantile(middle) - b * middle) / 2
    tables = np.zeros((2, SEGMENTS), np.float32)
    tables[0, used], tables[1, used] = a, b
    tables[0, 0] = _quantile(np.zeros(1, np.longdouble))[0]
    a_S, b_S = torch.from_numpy(tables).to(device)
    return a_S, b_S


def _quantile(x: NDArray[np.longdouble]) -> NDArray[np.longdouble]:
    """-log of an exponential variate whose quantile is x's."""
    upper = x < 0
    u = (np.abs(x) + np.where(upper, -0.5, 0.5)) * 2.0**-32
    return -np.log(-np.where(upper, np.log(u), np.log1p(-u)))
