"""The EAGLE-3 drafter (arXiv 2503.01840, section 3): low, middle and high hidden states of the policy, fused.

`fc` makes one hidden state of three; the layer's attention reads it beside the embedding of the next token, both
normed, and its residual stream begins with it (or with the normed one: `norm_before_residual`, as some public drafters
were trained). What the layer gives, before the final norm, is what the next step reads in its place. Final norm and LM
head are its own, the head over a reduced vocabulary (`draft_ids`), so all it shares with the policy is the embedding.
This is what vLLM and SGLang compute (models/export.py). It is trained on the policy's distribution alone, unrolled on
its own outputs (drafter/unrolling.py): what it feeds back needn't be like a feature of the policy.
Shapes as in drafter.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_pipeline.models.decoder import DecoderConfig, DecoderLayer, Linear, Ops, RMSNorm, Rope
from tlt_pipeline.models.drafter import Drafter


def default_taps(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are read, low, middle and high, as vLLM and SGLang count them: 2, n/2 and n - 3. In
    policies of fewer than 7 layers these would meet: then layers below the fifth, as different as can be."""
    high = max(layers - 3, min(4, layers - 1))
    middle = min(layers // 2, max(high - 1, 0))
    return min(2, max(middle - 1, 0)), middle, high


class Eagle3Layer(DecoderLayer):
    """Reads pairs (embedding, hidden state) [N, 2C] -> [N, C]."""

    def __init__(self, config: DecoderConfig, norm_before_residual: bool = False) -> None:
        super().__init__(config)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv = nn.Linear(2 * config.hidden_size, self.qkv.out_features, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, ops: Ops) -> Tensor:
        embedding, hidden = x.chunk(2, -1)
        normed = self.hidden_norm(hidden)
        pair = torch.cat([self.input_norm(embedding), normed], -1)
        residual = normed if self.norm_before_residual else hidden
        return self._feed_forward(residual + self._attention(pair, cos, sin, layer, ops), ops)


class Eagle3Drafter(Drafter):
    kind = "eagle3"

    layer: Eagle3Layer

    def __init__(
        self,
        config: DecoderConfig,
        taps: Sequence[int],
        draft_size: int,
        layer: DecoderConfig | None = None,
        norm_before_residual: bool = False,
    ) -> None:
        """`config` is the policy's; `taps`: layers of it; `draft_size`: v; `layer`: the dimensions of a drafter that
        wasn't made here, of the policy's hidden size and vocabulary."""
        super().__init__(config)
        self.config = layer or self.config
        size = config.hidden_size
        self.taps = tuple(taps)
        self.fc = nn.Linear(len(self.taps) * size, size, bias=False)
        self.layer = Eagle3Layer(self.config, norm_before_residual)
        self.own_norm = RMSNorm(size, config.rms_norm_eps)
        self.own_head = nn.Linear(size, draft_size, bias=False)
        self.rope = Rope(self.config)
        self.register_buffer("draft_ids", None)

    @property
    def owns_head(self) -> bool:
        return True

    def fuse(self, features_NF: Tensor, linear: Linear = F.linear) -> Tensor:
        return linear(features_NF[..., : self.fc.in_features], self.fc.weight, None)

    def draft_norm(self, norm: RMSNorm) -> RMSNorm:
        return self.own_norm

    def draft_head(self, head_VC: Tensor) -> Tensor:
        return self.own_head.weight

    def forward(self, next_embedding: Tensor, hidden: Tensor, positions: Tensor, ops: Ops) -> Tensor:
        cos, sin = self.rope.gather(positions, hidden.dtype)
        return self.layer(torch.cat([next_embedding, hidden], -1), cos, sin, 0, ops)
