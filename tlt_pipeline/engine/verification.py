"""One verify pass for everything: off (no proposals), chains, trees.

A tree's nodes share all matrix products. With the attention kernel (`KVCache.tiled`) every node gets a slot of its own
and names the slots of its path, which are read in the order of decoding. PyTorch's attention differs by what bits are
worth:
- where a row's bits must not depend on the batch (`exact`), each root-to-leaf path is laid out in the cache as decoding
  would lay it out, one after the other within a layer: a node's keys are reduced in the order in which decoding reduces
  them. Gaps between keys, masked, change the last bits (measured: in float32 nearly always);
- elsewhere every node gets a slot of its own and a mask shows it its ancestors: one call.
Shapes: B = rows, W = nodes a row, E = depth + 1, P = paths of a row, N = B * W, V = vocabulary, L = cache length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from tlt_kernels import dispatch
from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.cache import CachedAttention, attend_masked, attend_to, cache_slots, causal_mask
from tlt_pipeline.engine.forward import Forward
from tlt_pipeline.engine.proposals import Accepted, Proposals, Tree
from tlt_pipeline.engine.tiled_attention import TiledAttention, see_tree
from tlt_pipeline.models.decoder import Attend

if TYPE_CHECKING:
    from tlt_pipeline.engine.captured_passes import CapturedPasses


@dataclass(frozen=True)
class Verified:
    """features_NC: of every node [B * W, C]; `attention`: keeps a tree's keys and values."""

    features_NC: Tensor
    logits_NV: Tensor
    attention: TreeAttention | None


def verify(
    forward: Forward, batch: Batch, proposals: Proposals | None, exact: bool, passes: CapturedPasses | None = None
) -> Verified:
    """Reads the last committed token of each row and its proposals. `passes`: CUDA graphs of it."""
    B = len(batch)
    lengths_B = torch.from_numpy(batch.lengths[:B]).to(batch.device)
    tokens_BW = batch.tokens_RL[:B].gather(1, lengths_B.unsqueeze(1))
    if proposals is not None:
        tokens_BW = torch.cat([tokens_BW, proposals.tokens_BN], 1)
    W, attention = tokens_BW.shape[1], None
    if proposals is None or proposals.tree is None:
        positions_BW = lengths_B.unsqueeze(1) + torch.arange(W, device=batch.device)
        attend: Attend = attend_to(batch.cache, positions_BW, int(batch.lengths[:B].max()) + W, forward.layout)
    else:
        positions_BW = torch.from_numpy(batch.lengths[:B, None] + proposals.tree.depths_BW).to(batch.device)
        kind = PathAttention if exact and not batch.cache.tiled else SlotAttention
        attend = attention = kind(forward, batch, proposals.tree, proposals.depth)
    if passes is not None:
        inner = attend.inner if isinstance(attend, SlotAttention) else attend
        assert isinstance(inner, TiledAttention), "only such passes are captured"
        return Verified(*passes.verify(tokens_BW, positions_BW, inner.sight), attention)
    hidden_PC = forward.read(tokens_BW, positions_BW, attend)
    return Verified(hidden_PC[: B * W], forward.logits(hidden_PC)[: B * W], attention)


class TreeAttention(Protocol):
    """Attention of a tree's nodes that knows where their keys and values are afterwards."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def compact(self, accepted: Accepted) -> None:
        """Makes the accepted path's keys and values stand right after what is committed."""
        ...


class SlotAttention:
    """Every node has a slot of its own behind what is committed, where it stays."""

    def __init__(self, forward: Forward, batch: Batch, tree: Tree, depth: int) -> None:
        self._cache, self._lengths = batch.cache, batch.lengths[: len(batch)].copy()
        if batch.cache.tiled:
            self.inner: CachedAttention | TiledAttention = TiledAttention(
                batch.cache, see_tree(tree, depth, self._lengths, batch.device)
            )  # fmt: skip
        else:
            self.inner = _attend_with_mask(forward, batch, tree, depth)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(layer, q, k, v)

    def compact(self, accepted: Accepted) -> None:
        if not accepted.counts_B.any():
            return
        places = accepted.path_BD[:, 1:], accepted.counts_B
        device = self._cache.data.device
        lengths_B, nodes_BD, counts_B = (torch.from_numpy(part).to(device) for part in (self._lengths, *places))
        dispatch.kv_compact(self._cache.data, lengths_B, nodes_BD, counts_B)


def _attend_with_mask(forward: Forward, batch: Batch, tree: Tree, depth: int) -> CachedAttention:
    B, W = tree.depths_BW.shape
    cache, device = batch.cache, batch.device
    lengths_B = torch.from_numpy(batch.lengths[:B]).to(device)
    slots_BW = lengths_B.unsqueeze(1) + torch.arange(W, device=device)
    window = cache.window(0, B, min(forward.layout.padded_length(int(batch.lengths[:B].max()) + W), cache.length))
    mask_B1L = causal_mask((lengths_B - 1).unsqueeze(1), window[0][0])
    above_BWE = torch.from_numpy(tree.ancestors(depth)).to(device) + lengths_B[:, None, None]
    mask_BWL = mask_B1L.expand(B, W, -1).scatter(2, above_BWE, 0.0)
    return attend_masked(cache, slots_BW, mask_BWL, window)


class PathAttention:
    """Every path is laid out as decoding would lay it out. Paths overwrite each other, so keys and values are kept."""

    def __init__(self, forward: Forward, batch: Batch, tree: Tree, depth: int) -> None:
        self.batch = batch
        self.kept: list[tuple[Tensor, Tensor]] = []
        B, self.W = tree.depths_BW.shape
        self.count, device = B * self.W, batch.device
        paths_PBE, real_PBE = _paths(tree, depth)
        nodes_PBE = paths_PBE + np.arange(B)[None, :, None] * self.W
        self._nodes_N = torch.from_numpy(nodes_PBE.reshape(-1)).to(device)
        # filling goes to a row of its own behind the nodes
        self._targets_N = torch.from_numpy(np.where(real_PBE, nodes_PBE, self.count).reshape(-1)).to(device)
        self._part = B * (depth + 1)
        lengths_B = torch.from_numpy(batch.lengths[:B]).to(device)
        positions_BE = lengths_B.unsqueeze(1) + torch.arange(depth + 1, device=device)
        longest = int(batch.lengths[:B].max()) + depth + 1
        self._along = attend_to(batch.cache, positions_BE, longest, forward.layout)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept.append((k[: self.count], v[: self.count]))
        parts = zip(*(each.index_select(0, self._nodes_N).split(self._part) for each in (q, k, v)), strict=True)
        read_NHD = torch.cat([self._along(layer, *part) for part in parts])
        out = q.new_zeros((max(q.shape[0], self.count + 1), *q.shape[1:]))
        return out.index_copy_(0, self._targets_N, read_NHD)[: q.shape[0]]

    def compact(self, accepted: Accepted) -> None:
        cache, (B, E) = self.batch.cache, accepted.path_BD.shape
        nodes_N = torch.from_numpy((accepted.path_BD + np.arange(B)[:, None] * self.W).reshape(-1))
        nodes_N = nodes_N.to(self.batch.device)
        places_BE = torch.from_numpy(self.batch.lengths[:B, None] + np.arange(E)).to(self.batch.device)
        slots = cache_slots(places_BE, 0)
        for layer, (keys_NKD, values_NKD) in enumerate(self.kept):
            cache.write(layer, slots, keys_NKD.index_select(0, nodes_N), values_NKD.index_select(0, nodes_N))


def _paths(tree: Tree, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Root-to-leaf paths [P, B, E] (rows with fewer repeat their last one), and which of their places are no filling:
    what is deeper than a path's leaf repeats the leaf."""
    B = len(tree.depths_BW)
    above_BWE, leaves_BW = tree.ancestors(depth), tree.leaves()
    order_BW = np.argsort(~leaves_BW, axis=1, kind="stable")
    counts_B = leaves_BW.sum(1)
    picked_PB = np.stack([order_BW[np.arange(B), np.minimum(path, counts_B - 1)] for path in range(counts_B.max())])
    rows_B = np.arange(B)
    return above_BWE[rows_B, picked_PB], np.arange(depth + 1) <= tree.depths_BW[rows_B, picked_PB][..., None]
