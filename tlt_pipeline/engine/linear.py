"""Batch-invariant matrix products: a row's bits don't depend on the rows around it.

A CPU's matrix kernels round differently for different row counts, so the engine keeps the row count that reaches a
kernel constant (measured, float32 and bfloat16: in blocks of a fixed number of rows a row is exact wherever it
stands in its block). Whether it holds on the machine at hand is checked at start-up (invariance.py).
Shapes: N = rows, a multiple of `rows` where blocks are padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class RowLinear(Protocol):
    """A linear layer over rows, and the row count it wants (`padded`)."""

    def padded(self, rows: int) -> int: ...
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class PlainLinear:
    """As fast as the library makes it; bits depend on the batch."""

    def padded(self, rows: int) -> int:
        return rows

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


@dataclass(frozen=True)
class BlockLinear:
    """Every product is of exactly `rows` rows, the last block padded. `batched`: one call over all blocks (fast in
    float32 and float64; in bfloat16 that call repacks the weight for each block, so there it is a call a block)."""

    rows: int
    batched: bool

    def padded(self, rows: int) -> int:
        return -(-rows // self.rows) * self.rows

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        blocks = x.shape[0] // self.rows
        if not self.batched:
            return torch.cat([F.linear(block, weight, bias) for block in x.split(self.rows)])
        x_bRI = x.reshape(blocks, self.rows, x.shape[1])
        weight_bIO = weight.t().expand(blocks, weight.shape[1], weight.shape[0])
        out = torch.bmm(x_bRI, weight_bIO).view(x.shape[0], weight.shape[0])
        return out if bias is None else out.add_(bias)


def choose_linear(dtype: torch.dtype, exact: bool) -> RowLinear:
    if not exact:
        return PlainLinear()
    if dtype == torch.bfloat16:
        return BlockLinear(rows=16, batched=False)
    # with several threads the batched call splits its work by the number of blocks, and bits follow
    return BlockLinear(rows=8, batched=torch.get_num_threads() == 1)
