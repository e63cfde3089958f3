"""How a pass is cut into calls: as it comes, or so that a row's bits don't depend on the rows around it.

A CPU's matrix kernels round differently for different row counts. What helps depends on the machine (measured):
- AMD EPYC with AVX-512, float32 and bfloat16: from 4 rows on, every count gives the same bits (1, 2 and 3 rows reach
  other kernels; with packed weights only 1 row does, for some shapes, but 4 rows cost no more than 2), and so does
  every count of attention queries, except at some KV lengths (256 and 320 in float32), which are passed over. Few rows
  are filled up; that is all.
- Elsewhere only a fixed row count does: products in blocks of as many rows, the last one filled up, and attention with
  one query a call.
Which of them holds on the machine at hand is tried at start-up, the cheapest first (invariance.py). On a GPU with
Triton, products are the fixed-tile kernel's; attention is the cache's matter there (tiled_attention.py).
Shapes: N = rows, W = queries of a row.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_kernels import dispatch
from tlt_pipeline.engine.packing import PackedLinear, gains_by_packing, packed_linear
from tlt_pipeline.models.decoder import Decoder, Linear

LENGTH_BLOCK = 64
"""The KV length that attention sees is a multiple of this: other lengths change bits (measured)."""
QUERY_BLOCK = 32
"""PyTorch's attention kernel for CPUs goes through a row's queries in blocks of this size or a multiple."""


def round_up(value: int, block: int = LENGTH_BLOCK) -> int:
    return -(-value // block) * block


class RowLinear(Protocol):
    """A linear layer over rows, and the row count it wants (`padded`)."""

    def padded(self, rows: int) -> int: ...
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class PlainLinear:
    """As fast as the library makes it; bits depend on the batch."""

    product: Linear = F.linear

    def padded(self, rows: int) -> int:
        return rows

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.product(x, weight, bias)


@dataclass(frozen=True)
class RangeLinear:
    """Products of `low` to `high` rows."""

    low: int = 4
    high: int = 128
    product: Linear = F.linear

    def padded(self, rows: int) -> int:
        return max(rows, self.low)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] <= self.high:
            return self.product(x, weight, bias)
        parts = x.tensor_split(-(-x.shape[0] // self.high))
        return torch.cat([self.product(part, weight, bias) for part in parts])


@dataclass(frozen=True)
class BlockLinear:
    """Every product is of exactly `rows` rows, the last block padded. `batched`: one call over all blocks (fast in
    float32 and float64; in bfloat16 that call repacks the weight for each block, so there it is a call a block)."""

    rows: int
    batched: bool

    def padded(self, rows: int) -> int:
        return round_up(rows, self.rows)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        blocks = x.shape[0] // self.rows
        if not self.batched:
            return torch.cat([F.linear(block, weight, bias) for block in x.split(self.rows)])
        x_bRI = x.reshape(blocks, self.rows, x.shape[1])
        weight_bIO = weight.t().expand(blocks, weight.shape[1], weight.shape[0])
        out = torch.bmm(x_bRI, weight_bIO).view(x.shape[0], weight.shape[0])
        return out if bias is None else out.add_(bias)


@dataclass(frozen=True)
class TiledLinear:
    """The kernel of fixed tiles, which sums every row alike."""

    def padded(self, rows: int) -> int:
        return rows

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dispatch.linear(x, weight, bias)


@dataclass(frozen=True)
class Layout:
    """`queries`: 0: attention takes a row's queries as they come; 1: one query a call; n: at least n.
    `lengths`: KV lengths that attention may see, ascending; none: every multiple of LENGTH_BLOCK."""

    linear: RowLinear
    queries: int = 0
    lengths: tuple[int, ...] = ()

    def prepare(self, model: nn.Module) -> None:
        """Gets a model's weights ready now rather than in its first pass."""
        if isinstance(getattr(self.linear, "product", None), PackedLinear):
            packed_linear.prepare(model)

    def padded_queries(self, W: int) -> int:
        """How many queries a call gets for a row's W, where several go together: no block of fewer than `queries`."""
        if W <= QUERY_BLOCK or not self.queries:
            return max(W, self.queries)
        return round_up(W, self.queries)

    def padded_length(self, length: int) -> int:
        found = bisect_left(self.lengths, length)
        return self.lengths[found] if found < len(self.lengths) else round_up(length)


PLAIN = Layout(PlainLinear())


def plain_layout(policy: Decoder) -> Layout:
    """The fastest, whatever it does to bits. Packed products of 4 rows are as fast as of 1, in float32 faster."""
    return Layout(RangeLinear(product=packed_linear)) if gains_by_packing(policy) else PLAIN


def exact_layouts(policy: Decoder) -> tuple[Layout, ...]:
    """Those that may be batch-invariant, the cheapest first."""
    if policy.embed.weight.dtype == torch.bfloat16:
        blocks = BlockLinear(rows=16, batched=False)
    else:
        # with several threads the batched call splits its work by the number of blocks, and bits follow
        blocks = BlockLinear(rows=8, batched=torch.get_num_threads() == 1)
    packed = (Layout(RangeLinear(product=packed_linear), queries=4),) if gains_by_packing(policy) else ()
    tiled = (Layout(TiledLinear()),) if dispatch.takes_triton(policy.embed.weight) else ()
    return (*tiled, *packed, Layout(RangeLinear(), queries=4), Layout(blocks, queries=4), Layout(blocks, queries=1))
