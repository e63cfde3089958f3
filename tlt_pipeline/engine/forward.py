"""The policy's pass over running rows, plain or batch-invariant.

Shapes: B = rows, W = tokens a row, N = B * W flattened, P = N padded to what the linear layers want, C = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.engine.cache import KVCache, attend_to
from tlt_pipeline.engine.layout import Layout
from tlt_pipeline.models.decoder import Attend, Decoder, Ops

PREFILL_WIDTH = 128
"""Tokens of a prompt that are read in one pass: bounds the attention mask, and reaches the kernels that were tried."""


@dataclass(frozen=True)
class Forward:
    """`taps`: layers of the policy whose inputs are handed out as well, for drafters that read them. F = numbers of a
    token's features: C, with taps (taps + 1) * C, the last hidden state at the end."""

    policy: Decoder
    layout: Layout
    taps: tuple[int, ...] = ()

    def hidden(
        self, cache: KVCache, tokens_BW: Tensor, positions_BW: Tensor, longest: int, first_row: int = 0
    ) -> Tensor:
        """Reads tokens at their positions -> features before the final norm [P, F]; the first B * W rows count."""
        return self.read(tokens_BW, positions_BW, attend_to(cache, positions_BW, longest, self.layout, first_row))

    def read(self, tokens_BW: Tensor, positions_BW: Tensor, attend: Attend) -> Tensor:
        """The same, with an attention that knows where the tokens go."""
        padding = self.layout.linear.padded(tokens_BW.numel()) - tokens_BW.numel()
        tokens, positions = tokens_BW.flatten(), positions_BW.flatten()
        if padding:
            tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
        return self.policy.hidden(tokens, positions, Ops(attend, self.layout.linear), self.taps)

    def logits(self, features_PF: Tensor) -> Tensor:
        """[P, F] -> [P, V]."""
        last = features_PF[:, -self.policy.config.hidden_size :].contiguous() if self.taps else features_PF
        return self.policy.logits(last, self.layout.linear)


def prefill_features(forward: Forward, cache: KVCache, prompts: list[list[int]], first_row: int) -> Tensor:
    """Reads prompts, right-padded, into consecutive rows from `first_row` -> features [B, W, F]. What is written
    beyond a prompt's end is overwritten before anything may look at it."""
    width = max(len(prompt) for prompt in prompts)
    device = cache.data.device
    tokens_BW = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    positions_BW = torch.arange(width, device=device).expand_as(tokens_BW)
    features: list[Tensor] = []
    for start in range(0, width, PREFILL_WIDTH):
        part = slice(start, start + PREFILL_WIDTH)
        tokens_Bw = tokens_BW[:, part]
        hidden_PC = forward.hidden(cache, tokens_Bw, positions_BW[:, part], start + tokens_Bw.shape[1], first_row)
        features.append(hidden_PC[: tokens_Bw.numel()].view(*tokens_Bw.shape, -1))
    return torch.cat(features, 1)
