"""The KV cache of one slot: a row a running answer, running rows always the first ones.

Shapes: B = running rows, W = tokens a row in this pass, L = cache length, K = key/value heads, D = head size,
H = query heads, G = H / K, Q = queries of a row and key/value head, S = steps.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_kernels import dispatch
from tlt_pipeline.engine.layout import PLAIN, Layout, round_up
from tlt_pipeline.engine.tiled_attention import TiledAttention, see_everything_before
from tlt_pipeline.models.decoder import DecoderConfig

ALIGNMENT = 64
Slots = tuple[Tensor, Tensor]
"""Where the keys and values of N tokens go: rows and places in them, int64 [N] each."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros whose memory is taken when it is first written, on a CPU: a lease begins with a new cache, of which it uses
    a part (measured: 200 MB at once take 0.1 s). Aligned like PyTorch's own, since kernels may round by alignment."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size].view(dtype).view(shape)


class KVCache:
    def __init__(
        self, config: DecoderConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.length = round_up(length)
        self.group = config.num_heads // config.num_kv_heads
        # a head's keys lie together: attention reads them from memory up to 1.5 times as fast (measured, bfloat16)
        shape = (config.num_layers, 2, rows, config.num_kv_heads, self.length, config.head_dim)
        self.data = lazy_zeros(shape, dtype, device)
        self.tiled = dispatch.takes_triton(self.data)
        """Attention is the kernel's, on the whole cache; otherwise PyTorch's, on a window of it."""
        self.slots = [(layer[0], layer[1]) for layer in self.data.transpose(3, 4)]
        """Keys and values of each layer as [rows, L, K, D], to write into."""
        self._window: tuple[tuple[int, int, int], list[tuple[Tensor, Tensor]]] | None = None

    def write(self, layer: int, slots: Slots, k_NKD: Tensor, v_NKD: Tensor) -> None:
        """Keys and values of one layer, to slots as `cache_slots` gives them."""
        keys, values = self.slots[layer]
        keys.index_put_(slots, k_NKD)
        values.index_put_(slots, v_NKD)

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a row to another."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def window(self, first_row: int, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, [B, K, length, D]. Views are kept: making them costs as much as using them,
        and consecutive passes want the same."""
        wanted = (first_row, rows, length)
        if self._window is None or self._window[0] != wanted:
            part = self.data[:, :, first_row : first_row + rows, :, :length]
            self._window = wanted, [(layer[0], layer[1]) for layer in part]
        return self._window[1]


class CachedAttention:
    """Attention of one pass: writes the new keys and values at their positions, then looks at everything up to them.

    The W tokens of a row and the G heads that share keys and values go together as Q = W * G queries: keys and values
    are read once for all of them. Where the layout wants one query a call, they are laid out as if they were heads that
    share keys and values, which makes that one call.
    """

    def __init__(
        self,
        cache: KVCache,
        slots: Slots,
        mask: Tensor | None,
        window: list[tuple[Tensor, Tensor]],
        shape: tuple[int, int],
        layout: Layout = PLAIN,
    ) -> None:
        """See `attend_to`. mask: 0 where a token may look, -inf elsewhere; [B, 1, Q + padding, L], [B, 1, W, L] where
        one query goes a call."""
        self.cache, self.slots, self.mask, self.window = cache, slots, mask, window
        self.B, self.W = shape
        self.one_query = layout.queries == 1
        self.padding = _padding(layout, self.W * cache.group)
        self._heads_mask: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, K, D] with N >= B * W (the rest is padding) -> [N, H, D]."""
        count, padded = self.B * self.W, q.shape[0]
        if count != padded:
            q, k, v = q[:count], k[:count], v[:count]
        self.cache.write(layer, self.slots, k, v)
        look = self._one_by_one if self.one_query else self._together
        out = look(q, *self.window[layer])
        return out if count == padded else F.pad(out, (0, 0, 0, 0, 0, padded - count))

    def _together(self, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        B, W, K, G = self.B, self.W, keys.shape[1], self.cache.group
        H, D = q_NHD.shape[1:]
        q_BKQD = q_NHD.view(B, W, K, G, D).transpose(1, 2).reshape(B, K, W * G, D)
        if self.padding:
            q_BKQD = F.pad(q_BKQD, (0, 0, 0, self.padding))
        out = F.scaled_dot_product_attention(q_BKQD, keys, values, attn_mask=self.mask)
        if self.padding:
            out = out[:, :, : W * G]
        return out.unflatten(2, (W, G)).transpose(1, 2).reshape(B * W, H, D)

    def _one_by_one(self, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        B, W, (H, D) = self.B, self.W, q_NHD.shape[1:]
        if W == 1:
            q, mask = q_NHD.view(B, H, 1, D), self.mask
        else:
            q = q_NHD.view(B, W, H, D).transpose(1, 2).reshape(B, H * W, 1, D)
            mask = self._mask_for(H)
        grouped = q.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
        return out.view(B, H, W, D).transpose(1, 2).reshape(B * W, H, D)

    def _mask_for(self, heads: int) -> Tensor:
        assert self.mask is not None
        if self._heads_mask is None:
            expanded = self.mask.expand(self.B, heads, self.W, self.mask.shape[-1])
            self._heads_mask = expanded.reshape(self.B, heads * self.W, 1, -1)
        return self._heads_mask


def attend_to(
    cache: KVCache,
    positions_BW: Tensor,
    longest: int,
    layout: Layout = PLAIN,
    first_row: int = 0,
    since_BW: Tensor | None = None,
) -> CachedAttention | TiledAttention:
    """One pass of W tokens a row. positions_BW int64: where each token stands; `longest`: at least the largest
    position + 1; `since_BW`: the first position that each may look at, None: the first of all."""
    if cache.tiled:
        return TiledAttention(cache, see_everything_before(positions_BW, since_BW), first_row)
    B, W = positions_BW.shape
    slots = cache_slots(positions_BW, first_row)
    if B == W == 1 and not layout.queries and since_BW is None:
        # one query of one row may look at everything there is: no mask, and no padding where bits don't matter
        return CachedAttention(cache, slots, None, cache.window(first_row, B, longest), (B, W))
    window = cache.window(first_row, B, min(layout.padded_length(longest), cache.length))
    mask_BWL = causal_mask(positions_BW, window[0][0], since_BW)
    if layout.queries == 1:
        mask = mask_BWL.unsqueeze(1)
    else:
        mask_BQL = mask_BWL if cache.group == 1 else mask_BWL.repeat_interleave(cache.group, 1)
        mask = F.pad(mask_BQL, (0, 0, 0, _padding(layout, W * cache.group))).unsqueeze(1)
    return CachedAttention(cache, slots, mask, window, (B, W), layout)


def attend_masked(
    cache: KVCache, places_BW: Tensor, mask_BWL: Tensor, window: list[tuple[Tensor, Tensor]]
) -> CachedAttention:
    """One pass of W nodes a row of a tree: where each one's key and value go, and what it may look at."""
    B, W = places_BW.shape
    mask_BQL = mask_BWL if cache.group == 1 else mask_BWL.repeat_interleave(cache.group, 1)
    return CachedAttention(cache, cache_slots(places_BW, 0), mask_BQL.unsqueeze(1), window, (B, W))


def attend_in_steps(
    cache: KVCache, positions_BS: Tensor, longest: int, since_BS: Tensor | None = None
) -> list[CachedAttention] | list[TiledAttention]:
    """S passes of one token a row each, prepared together: a drafter's."""
    B, S = positions_BS.shape
    if cache.tiled:
        sinces = [None] * S if since_BS is None else list(since_BS.split(1, 1))
        parts = zip(positions_BS.split(1, 1), sinces, strict=True)
        return [TiledAttention(cache, see_everything_before(*part)) for part in parts]
    rows_B = torch.arange(B, device=positions_BS.device)
    positions_SB = positions_BS.t().contiguous()
    window = cache.window(0, B, min(round_up(longest), cache.length))
    mask_SBL = causal_mask(positions_SB, window[0][0], None if since_BS is None else since_BS.t())
    masks_SB1QL = mask_SBL[:, :, None, None].expand(-1, -1, -1, cache.group, -1)
    return [
        CachedAttention(cache, (rows_B, positions_SB[step]), masks_SB1QL[step], window, (B, 1)) for step in range(S)
    ]


def _padding(layout: Layout, queries: int) -> int:
    return 0 if layout.queries == 1 else layout.padded_queries(queries) - queries


def cache_slots(places_BW: Tensor, first_row: int) -> Slots:
    """Where the tokens of consecutive rows go."""
    B, W = places_BW.shape
    rows_B = torch.arange(first_row, first_row + B, device=places_BW.device)
    return rows_B.repeat_interleave(W) if W > 1 else rows_B, places_BW.flatten()


def causal_mask(positions: Tensor, keys_BKLD: Tensor, since: Tensor | None = None) -> Tensor:
    """positions, since [...] -> [..., L]: 0 where a token may look, -inf elsewhere."""
    places_L = torch.arange(keys_BKLD.shape[2], device=positions.device)
    mask = keys_BKLD.new_zeros((*positions.shape, len(places_L)))
    mask.masked_fill_(places_L > positions.unsqueeze(-1), float("-inf"))
    return mask if since is None else mask.masked_fill_(places_L < since.unsqueeze(-1), float("-inf"))
