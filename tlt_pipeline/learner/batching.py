"""Sequences to padded micro-batches of bounded size, in an order that depends on the sequences alone.

Rows of similar length share a micro-batch (padding costs as much as text), and a micro-batch holds at most a
budget of padded tokens. Letters: B = rows, T = padded length, A = answer tokens of the micro-batch, row after
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CALL_COST = 128
"""What a micro-batch costs beside its tokens, in tokens: so much padding is worth saving a call."""


@dataclass(frozen=True)
class Example:
    """Token ids, the first `prompt` of which are given; loss falls on the rest, the answer."""

    tokens: tuple[int, ...]
    prompt: int

    def __post_init__(self) -> None:
        if not 0 < self.prompt < len(self.tokens):
            raise ValueError(
                f"{self.prompt} prompt tokens of {len(self.tokens)}: prompt and answer must both hold tokens"
            )

    @property
    def answer(self) -> int:
        return len(self.tokens) - self.prompt


@dataclass(frozen=True)
class MicroBatch:
    """`indices`: which sequences, in row order. `predictors_A`: flat positions (row · T + column) whose
    feature predicts an answer token; `targets_A`: that token; `rows_A`: its row."""

    indices: tuple[int, ...]
    tokens_BT: Tensor
    predictors_A: Tensor
    targets_A: Tensor
    rows_A: Tensor


def bucket(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in micro-batches of at most `budget` padded tokens: longest first, ties in the given order, cut
    where padding and calls together cost least.

    A sequence above the budget gets a micro-batch of its own. The longest come first so that memory peaks at
    once, not at the end."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    costs, starts = [0], [0]  # of the best cut of the first n rows; where its last micro-batch starts
    for end in range(1, len(order) + 1):
        best, start = -1, end - 1
        for first in range(end - 1, -1, -1):
            padded = lengths[order[first]] * (end - first)
            if padded > budget and first < end - 1:
                break
            cost = costs[first] + padded + CALL_COST
            if best < 0 or cost < best:
                best, start = cost, first
        costs.append(best)
        starts.append(start)
    batches: list[list[int]] = []
    end = len(order)
    while end > 0:
        batches.append(order[starts[end] : end])
        end = starts[end]
    return batches[::-1]


def collate(sequences: Sequence[Example], indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Right-padded rows: with a causal mask the padding (token 0) is seen by nothing that counts."""
    rows = [sequences[index] for index in indices]
    T = max(len(row.tokens) for row in rows)
    tokens_BT = torch.zeros(len(rows), T, dtype=torch.int64)
    predictors: list[Tensor] = []
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row.tokens)] = torch.tensor(row.tokens)
        predictors.append(torch.arange(row.prompt - 1, len(row.tokens) - 1) + number * T)
    predictors_A = torch.cat(predictors)
    return MicroBatch(
        indices=tuple(indices),
        tokens_BT=tokens_BT.to(device),
        predictors_A=predictors_A.to(device),
        targets_A=tokens_BT.flatten()[predictors_A + 1].to(device),
        rows_A=(predictors_A // T).to(device),
    )
