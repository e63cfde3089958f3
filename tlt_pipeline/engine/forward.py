"""The policy's pass over running rows, plain or batch-invariant.

Shapes: B = rows, W = tokens a row, N = B * W flattened, P = N padded to what the linear layers want, C = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.engine.cache import CachedAttention, KVCache
from tlt_pipeline.engine.linear import RowLinear, choose_linear
from tlt_pipeline.models.decoder import Decoder, Ops


@dataclass(frozen=True)
class Forward:
    policy: Decoder
    exact: bool
    linear: RowLinear

    @classmethod
    def of(cls, policy: Decoder, exact: bool) -> Forward:
        return cls(policy, exact, choose_linear(policy.embed.weight.dtype, exact))

    def hidden(
        self, cache: KVCache, tokens_BW: Tensor, positions_BW: Tensor, longest: int, first_row: int = 0
    ) -> Tensor:
        """Reads tokens at their positions -> features before the final norm [P, C]; the first B * W rows count."""
        attend = CachedAttention(cache, positions_BW, longest, self.exact, first_row)
        padding = self.linear.padded(tokens_BW.numel()) - tokens_BW.numel()
        tokens, positions = tokens_BW.flatten(), positions_BW.flatten()
        if padding:
            tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
        return self.policy.hidden(tokens, positions, Ops(attend, self.linear))

    def logits(self, hidden_PC: Tensor) -> Tensor:
        """[P, C] -> [P, V]."""
        return self.policy.logits(hidden_PC, self.linear)


def prefill_features(forward: Forward, cache: KVCache, prompts: list[list[int]], first_row: int) -> Tensor:
    """Reads prompts, right-padded, into consecutive rows from `first_row` -> features [B, W, C]. What is written
    beyond a prompt's end is overwritten before anything may look at it."""
    width = max(len(prompt) for prompt in prompts)
    device = cache.data.device
    tokens_BW = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    positions_BW = torch.arange(width, device=device).expand_as(tokens_BW)
    hidden_PC = forward.hidden(cache, tokens_BW, positions_BW, width, first_row)
    return hidden_PC[: tokens_BW.numel()].view(*tokens_BW.shape, -1)
