"""The drafter over whole documents, also as drafting runs it: on its own predictions (training-time test).

While drafting, only the first proposal sees the policy's feature; from the second on the drafter reads the features
that it predicted itself. EAGLE-3 (arXiv 2503.01840, section 3) and HASS (arXiv 2408.15766) train on that. All
positions at once: step j's input at place s is what step j-1 predicted from place s-1. Its query sees step 1's keys
(true features) up to place s-j+1, and of every later step i ≤ j the one key at place s-j+i, just as the drafter's KV
cache holds them. Shapes: S = steps, R = rows (1), W = width, H = query heads, K = key/value heads, D = head size,
C = hidden size, L = tokens of a document.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.drafter.batching import Batch, DocumentAttention
from tlt_pipeline.models.decoder import Ops
from tlt_pipeline.models.drafter import Drafter

PLACES = 128
"""Of a document, whose queries are looked at together."""


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
        keys, values = zip(*self._keys, strict=True), zip(*self._values, strict=True)
        documents = zip(q.transpose(1, 2).split(self.lengths, 2), keys, values, strict=True)
        parts = [_read(*document) for document in documents]
        return torch.cat(parts, 2).transpose(1, 2)


def _read(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """One document's queries of the last step [R, H, L, D], with all steps' keys and values [R, K, L, D]. Some places
    at a time: of a later step these look at the keys near them alone, so the cost hardly grows with the steps."""
    step, length = len(keys), q.shape[2]
    read: list[Tensor] = []
    for low in range(0, length, PLACES):
        high, first = min(low + PLACES, length), max(low - step, 0)
        seen = [slice(0, high)] + [slice(first, high)] * (step - 1)
        read.append(
            F.scaled_dot_product_attention(
                q[:, :, low:high],
                torch.cat([part[:, :, near] for part, near in zip(keys, seen, strict=True)], 2),
                torch.cat([part[:, :, near] for part, near in zip(values, seen, strict=True)], 2),
                attn_mask=_look_back(low, high, first, step, q.device),
                enable_gqa=True,
            )
        )
    return torch.cat(read, 2)


def _look_back(low: int, high: int, first: int, step: int, device: torch.device) -> Tensor:
    """Where the queries of step `step` at places `low` to `high` may look, True: at step 1's keys from place 0, and at
    each later step's from place `first`."""
    places = torch.arange(high, device=device)
    back = places[low:, None] - places  # how many places the key is behind the query
    blocks = [back >= step - 1] + [back[:, first:] == step - index for index in range(2, step + 1)]
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
