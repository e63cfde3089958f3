"""The KV cache of one slot: a row a running answer, running rows always the first ones.

Shapes: B = running rows, W = tokens a row in this pass, L = cache length, K = key/value heads, D = head size,
H = query heads, G = H / K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.models.decoder import DecoderConfig

LENGTH_BLOCK = 64
"""The KV length that attention sees is a multiple of this: other lengths change bits (measured)."""


def round_up(value: int, block: int = LENGTH_BLOCK) -> int:
    return -(-value // block) * block


class KVCache:
    def __init__(
        self, config: DecoderConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.length = round_up(length)
        shape = (config.num_layers, 2, rows, self.length, config.num_kv_heads, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a row to another."""
        self.data[:, :, target, :length] = self.data[:, :, source, :length]


class CachedAttention:
    """Attention of one pass: writes the new keys and values at their positions, then looks at everything up to them.

    `exact`: one query a call, so that a row's bits don't depend on how many tokens are verified beside it; the W
    queries of a row are laid out as if they were heads that share keys and values, which makes that one call.
    """

    def __init__(self, cache: KVCache, positions_BW: Tensor, longest: int, exact: bool, first_row: int = 0) -> None:
        """positions_BW int64: where each token stands; `longest`: at least the largest position + 1."""
        self.cache, self.exact = cache, exact
        self.B, self.W = positions_BW.shape
        self.first_row = first_row
        # one query of one row may look at everything there is: no mask, and no padding where bits don't matter
        single = self.B == self.W == 1 and not exact
        self.L = longest if single else min(round_up(longest), cache.length)
        device, dtype = cache.data.device, cache.data.dtype
        rows_B1 = torch.arange(first_row, first_row + self.B, device=device).unsqueeze(1)
        self.slots_N = (rows_B1 * cache.length + positions_BW).flatten()
        self.mask = None if single else self._causal_mask(positions_BW, dtype)
        self._heads_mask: Tensor | None = None

    def _causal_mask(self, positions_BW: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, 1, W, L]: 0 where a token may look, -inf elsewhere."""
        mask_BWL = torch.zeros((self.B, self.W, self.L), dtype=dtype, device=positions_BW.device)
        hidden_BWL = torch.arange(self.L, device=positions_BW.device) > positions_BW.unsqueeze(-1)
        return mask_BWL.masked_fill_(hidden_BWL, float("-inf")).unsqueeze(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, K, D] with N >= B * W (the rest is padding) -> [N, H, D]."""
        count, rows = self.B * self.W, slice(self.first_row, self.first_row + self.B)
        keys, values = self.cache.data[layer, 0], self.cache.data[layer, 1]
        keys.flatten(0, 1).index_copy_(0, self.slots_N, k[:count])
        values.flatten(0, 1).index_copy_(0, self.slots_N, v[:count])
        keys_BKLD = keys[rows, : self.L].transpose(1, 2)
        values_BKLD = values[rows, : self.L].transpose(1, 2)
        q_BWHD = q[:count].view(self.B, self.W, q.shape[1], q.shape[2])
        out = self._exact(q_BWHD, keys_BKLD, values_BKLD) if self.exact else self._plain(q_BWHD, keys_BKLD, values_BKLD)
        return out if count == q.shape[0] else F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - count))

    def _plain(self, q_BWHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        grouped = q_BWHD.shape[2] != keys.shape[1]
        out = F.scaled_dot_product_attention(
            q_BWHD.transpose(1, 2), keys, values, attn_mask=self.mask, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _exact(self, q_BWHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        B, W, H, D = q_BWHD.shape
        if W == 1:
            q, mask = q_BWHD.view(B, H, 1, D), self.mask
        else:
            q = q_BWHD.transpose(1, 2).reshape(B, H * W, 1, D)
            mask = self._mask_for(H)
        grouped = q.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
        return out.view(B, H, W, D).transpose(1, 2).reshape(B * W, H, D)

    def _mask_for(self, heads: int) -> Tensor:
        assert self.mask is not None
        if self._heads_mask is None:
            expanded = self.mask.expand(self.B, heads, self.W, self.L)
            self._heads_mask = expanded.reshape(self.B, heads * self.W, 1, self.L)
        return self._heads_mask
