"""Attention by the fixed-tile kernel: what a token sees is said by tensors whose shapes follow from (rows, tokens a
row) alone, so that a pass can be captured as a CUDA graph, and a token's bits depend on nothing but its own answer.
Decoding, chains, trees, prompts and drafting all go through it wherever the kernels run (`KVCache.tiled`).

Shapes: B = rows, W = tokens a row, N = B * W, P = named slots, E = depth + 1, H, K, D: see cache.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_kernels import dispatch
from tlt_pipeline.engine.proposals import Ints, Tree

if TYPE_CHECKING:
    from tlt_pipeline.engine.cache import KVCache


@dataclass(frozen=True)
class Sight:
    """slots_BW (int64): where a token's key and value go. It sees `lengths_BW` tokens, itself the last of them, from
    `since_BW` on; paths_BWP: the slots of the last P of them, right-aligned; the others stand at their own position
    (int32; see tlt_kernels/attention)."""

    slots_BW: Tensor
    lengths_BW: Tensor
    paths_BWP: Tensor
    since_BW: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.slots_BW, self.lengths_BW, self.paths_BWP, self.since_BW

    def widened(self, places: int) -> Sight:
        """The same with P = `places`: more of the tokens are named."""
        more = places - self.paths_BWP.shape[-1]
        if not more:
            return self
        offsets_p = torch.arange(more, dtype=torch.int32, device=self.slots_BW.device)
        tokens_BWp = (self.lengths_BW.unsqueeze(-1) - places + offsets_p).clamp_min_(0)
        return Sight(self.slots_BW, self.lengths_BW, torch.cat([tokens_BWp, self.paths_BWP], -1), self.since_BW)


def see_everything_before(positions_BW: Tensor, since_BW: Tensor | None = None) -> Sight:
    """Tokens at their own positions (int64)."""
    return _sight(positions_BW, positions_BW + 1, positions_BW.unsqueeze(-1), since_BW)


def see_path(slots_BW: Tensor, committed_B: Tensor, above_BWP: Tensor, since_BW: Tensor | None = None) -> Sight:
    """Nodes that all see what is committed and then P slots, their own the last (int64)."""
    lengths_BW = (committed_B.unsqueeze(1) + above_BWP.shape[-1]).expand_as(slots_BW)
    return _sight(slots_BW, lengths_BW, above_BWP, since_BW)


def see_tree(tree: Tree, depth: int, committed_B: Ints, device: torch.device) -> Sight:
    """A tree's nodes, each in a slot of its own behind what is committed."""
    W, E = tree.depths_BW.shape[1], depth + 1
    committed_B1 = committed_B[:, None]
    # of each node's last E tokens: how deep in the tree, below 0 committed
    depths_BWE = tree.depths_BW[:, :, None] - np.arange(depth, -1, -1)
    above_BWE = np.take_along_axis(tree.ancestors(depth), depths_BWE.clip(0), 2)
    behind_BWE = np.where(depths_BWE >= 0, above_BWE, depths_BWE)
    slots_BW = committed_B1 + np.arange(W)
    paths_BWE = (committed_B1[:, :, None] + behind_BWE).clip(0)
    lengths_BW = committed_B1 + tree.depths_BW + 1
    assert paths_BWE.shape[-1] == E
    return _sight(*(torch.from_numpy(part).to(device) for part in (slots_BW, lengths_BW, paths_BWE)), None)


def _sight(slots_BW: Tensor, lengths_BW: Tensor, paths_BWP: Tensor, since_BW: Tensor | None) -> Sight:
    lengths_BW = lengths_BW.int()
    since_BW = torch.zeros_like(lengths_BW) if since_BW is None else since_BW.int().expand_as(lengths_BW)
    return Sight(slots_BW, lengths_BW, paths_BWP.int(), since_BW)


class TiledAttention:
    """One pass over consecutive rows of a cache, from `first_row` on."""

    def __init__(self, cache: KVCache, sight: Sight, first_row: int = 0) -> None:
        self.cache, self.sight, self.first_row = cache, sight, first_row
        B, W = sight.slots_BW.shape
        rows_B = torch.arange(first_row, first_row + B, device=sight.slots_BW.device)
        rows_N = rows_B.repeat_interleave(W) if W > 1 else rows_B
        self._slots = rows_N, sight.slots_BW.flatten()
        self._seen = (rows_N.int(), *(part.flatten(0, 1) for part in sight.tensors()[1:]))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, K, D], with more rows where the linear layers pad -> as many [N, H, D]."""
        count, padded = len(self._slots[0]), q.shape[0]
        if count != padded:
            q, k, v = q[:count], k[:count], v[:count]
        self.cache.write(layer, self._slots, k, v)
        keys_RKLD, values_RKLD = self.cache.data[layer].unbind()
        out = dispatch.attention(q, keys_RKLD, values_RKLD, *self._seen)
        return out if count == padded else F.pad(out, (0, 0, 0, 0, 0, padded - count))
