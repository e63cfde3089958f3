"""Inputs on which the order of a sum shows: their exact results are zero, so that what comes out is rounding alone.

Two kernels that add the same terms in another order agree on ordinary inputs nearly always in bfloat16, since the
result is rounded to 8 bits (measured: attention over 256 keys differs from that over 512 in 1 of 100,000 values; on
these inputs in 65 %). Terms cancel in pairs that stand half a row apart.
Shapes: N = rows, I, O = a weight's in and out features, K = heads, Q = queries, L = keys, D = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SPREAD = 2.0**11
"""Queries and keys of this size make scores whose rounding is about 1: it decides where attention looks."""


def cancelling_product(rows: int, shape: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, I] and a weight [O, I] with x · weightᵀ = 0, in the dtype and on the device of `like`."""
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):  # a weight that counts its versions, as packing wants
        x = _repeat(torch.randn(rows, in_features, generator=generator))
        weight = _oppose(torch.randn(out_features, in_features, generator=generator))
        return x.to(like.device, like.dtype), weight.to(like.device, like.dtype)


@dataclass(frozen=True)
class AttentionProbe:
    """q [1, K, Q, D], k and v [1, K, L, D]; all heads alike."""

    q: Tensor
    k: Tensor
    v: Tensor


class AttentionProbes:
    """Attention inputs of up to `queries` queries and `length` keys."""

    def __init__(self, heads: int, queries: int, length: int, head_dim: int, like: Tensor) -> None:
        generator = torch.Generator().manual_seed(0)
        self._heads = heads
        self._q, self._k, self._v = (
            torch.randn(size, head_dim, generator=generator).to(like.device, like.dtype)
            for size in (queries, length, length)
        )
        self.scores = self._probe(_repeat(self._q) * SPREAD, _oppose(self._k) * SPREAD, self._v)
        """All scores are zero: shows the order in which they were summed."""

    def values(self, used: int) -> AttentionProbe:
        """The first `used` values cancel: shows the order in which they were summed."""
        k, v = self._k.clone(), self._v.clone()
        k[:used], v[:used] = _repeat(k[:used], 0), _oppose(v[:used], 0)
        return self._probe(self._q, k, v)

    def _probe(self, q_QD: Tensor, k_LD: Tensor, v_LD: Tensor) -> AttentionProbe:
        q, k, v = (x.expand(1, self._heads, -1, -1) for x in (q_QD, k_LD, v_LD))
        return AttentionProbe(q, k, v)


def _repeat(x: Tensor, dim: int = -1) -> Tensor:
    """The second half becomes the first; of an odd size, the last element becomes zero in `_oppose`."""
    half = x.shape[dim] // 2
    first = x.narrow(dim, 0, half)
    return torch.cat([first, first, x.narrow(dim, 2 * half, x.shape[dim] - 2 * half)], dim)


def _oppose(x: Tensor, dim: int = -1) -> Tensor:
    """The second half becomes the first's opposite."""
    half = x.shape[dim] // 2
    first = x.narrow(dim, 0, half)
    rest = x.narrow(dim, 2 * half, x.shape[dim] - 2 * half)
    return torch.cat([first, -first, torch.zeros_like(rest)], dim)
