"""The drafter over whole documents, also as drafting runs it: on its own predictions (training-time test).

While drafting, only the first proposal sees the policy's feature; from the second on the drafter reads the features
that it predicted itself. EAGLE-3 (arXiv 2503.01840, section 3) and HASS (arXiv 2408.15766) train on that. All
positions at once: step j's input at place s is what step j-1 predicted from place s-1. Its query sees step 1's keys
(true features) up to place s-j+1, and of every later step i ≤ j the one key at place s-j+i, just as the drafter's KV
cache holds them. Shapes: S = steps, R = rows (1), W = width, H = query heads, K = key/value heads, D = head size,
C = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.drafter.batching import Batch, DocumentAttention
from tlt_pipeline.models.decoder import Ops
from tlt_pipeline.models.drafter import Drafter


class UnrolledAttention:
    """Attention for consecutive calls, one a step, inside documents. It remembers each step's keys and values."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths`: of the documents of the row."""
        self.lengths = list(lengths)
        self._first = DocumentAttention(lengths)
        self._keys: list[tuple[Tensor, ...]] = []
        self._values: list[tuple[Tensor, ...]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, W, H, D], k and v [R, W, K, D] -> [R, W, H, D]."""
        self._keys.append(k.transpose(1, 2).split(self.lengths, 2))
        self._values.append(v.transpose(1, 2).split(self.lengths, 2))
        if len(self._keys) == 1:
            return self._first(layer, q, k, v)
        read = [
            F.scaled_dot_product_attention(
                query,
                torch.cat([keys[document] for keys in self._keys], 2),
                torch.cat([values[document] for values in self._values], 2),
                attn_mask=_look_back(query.shape[2], len(self._keys), query.device),
                enable_gqa=True,
            )
            for document, query in enumerate(q.transpose(1, 2).split(self.lengths, 2))
        ]
        return torch.cat(read, 2).transpose(1, 2)


def _look_back(length: int, step: int, device: torch.device) -> Tensor:
    """[length, step × length], True where step `step`'s query may look."""
    places = torch.arange(length, device=device)
    back = places.unsqueeze(1) - places  # how many places the key is behind the query
    blocks = [back >= step - 1] + [back == step - index for index in range(2, step + 1)]
    return torch.cat(blocks, -1)


def unroll(drafter: Drafter, embedding: Tensor, batch: Batch, steps: int) -> Tensor:
    """Predicted features of `steps` steps, [S, R, W, C]: step j's at place s predicts targets_RWC at s."""
    attend = UnrolledAttention(batch.lengths)
    next_RWC = F.embedding(batch.next_tokens_RW, embedding)
    inputs_RWC = first_RWC = drafter.fuse(batch.hidden_RWC)
    starts_RW1 = (batch.offsets_RW == 0).unsqueeze(-1)
    predicted: list[Tensor] = []
    for step in range(steps):
        if step:
            moved_RWC = torch.cat([predicted[-1][:, :1], predicted[-1][:, :-1]], 1)
            inputs_RWC = torch.where(starts_RW1, first_RWC, moved_RWC)
        predicted.append(drafter(next_RWC, inputs_RWC, batch.positions_RW, Ops(attend)))
    return torch.stack(predicted)


def step_weights(batch: Batch, steps: int) -> Tensor:
    """[S, R, W]: the pair's weight where step j has its j - 1 earlier steps inside the document, else 0."""
    reached = [batch.offsets_RW >= step for step in range(steps)]
    return torch.stack([batch.weight_RW * inside for inside in reached])
