"""The drafter over whole documents, also as drafting runs it: on its own predictions (training-time test).

While drafting, only the first proposal sees the policy's feature; from the second on the drafter reads the features
that it predicted itself. EAGLE-3 (arXiv 2503.01840, section 3) and HASS (arXiv 2408.15766) train on that. All
positions at once: step j's input at place s is what step j-1 predicted from place s-1. Its query sees step 1's keys
(true features) up to place s-j+1, and of every later step i ≤ j the one key at place s-j+i, just as the drafter's KV
cache holds them. Shapes: S = steps, R = rows, W = width, H = query heads, K = key/value heads, D = head size,
C = hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.drafter.batching import Batch
from tlt_pipeline.models.decoder import Ops
from tlt_pipeline.models.drafter import EagleDrafter


class UnrolledAttention:
    """Attention for consecutive calls, one a step, inside documents. It remembers each step's keys and values."""

    def __init__(self, documents_RW: Tensor) -> None:
        width = documents_RW.shape[1]
        self.same_RWW = documents_RW.unsqueeze(2) == documents_RW.unsqueeze(1)
        places = torch.arange(width, device=documents_RW.device)
        self.back_WW = places.unsqueeze(1) - places
        """How many places the key is behind the query."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, W, H, D], k and v [R, W, K, D] -> [R, W, H, D]."""
        self.keys.append(k.transpose(1, 2))
        self.values.append(v.transpose(1, 2))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            torch.cat(self.keys, 2),
            torch.cat(self.values, 2),
            attn_mask=self._mask().unsqueeze(1),
            enable_gqa=q.shape[-2] != k.shape[-2],
        )
        return out.transpose(1, 2)

    def _mask(self) -> Tensor:
        """[R, W, steps so far × W], True where the newest step's query may look."""
        step = len(self.keys)
        blocks = [self.back_WW >= step - 1] + [self.back_WW == step - index for index in range(2, step + 1)]
        return torch.cat([self.same_RWW & block for block in blocks], -1)


def unroll(drafter: EagleDrafter, embedding: Tensor, batch: Batch, steps: int) -> Tensor:
    """Predicted features of `steps` steps, [S, R, W, C]: step j's at place s predicts targets_RWC at s."""
    attend = UnrolledAttention(batch.documents_RW)
    next_RWC = F.embedding(batch.next_tokens_RW, embedding)
    inputs_RWC = batch.hidden_RWC
    starts_RW1 = (batch.offsets_RW == 0).unsqueeze(-1)
    predicted: list[Tensor] = []
    for step in range(steps):
        if step:
            moved_RWC = torch.cat([predicted[-1][:, :1], predicted[-1][:, :-1]], 1)
            inputs_RWC = torch.where(starts_RW1, batch.hidden_RWC, moved_RWC)
        predicted.append(drafter(next_RWC, inputs_RWC, batch.positions_RW, Ops(attend)))
    return torch.stack(predicted)


def step_weights(batch: Batch, steps: int) -> Tensor:
    """[S, R, W]: the pair's weight where step j has its j - 1 earlier steps inside the document, else 0."""
    reached = [batch.offsets_RW >= step for step in range(steps)]
    return torch.stack([batch.weight_RW * inside for inside in reached])
