"""From documents to batches: which pairs the drafter learns from, packed into rows.

The pairing, the same as in the engine. In a document of T tokens x and features h, pair t (0 ≤ t ≤ T-2) is

    input   embedding of x[t+1], feature h[t], at h[t]'s position
    target  feature h[t+1], and what the policy says after reading x[t+1]: softmax(head(norm(h[t+1])))

That distribution is the one token t+2 is drawn from, so pair t counts exactly if token t+2 belongs to the answer.
The last pair's token t+2 lies behind the document: it counts if token t+1 belongs to the answer (an answer's
last document ends with the last token the policy read, which is the one before the stop token).

Documents are packed into rows of equal width, first fit by falling length. Attention stays inside a document and
positions restart with each. Shapes: R = rows, W = width, C = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_pipeline.drafter.shards import Document


@dataclass(frozen=True)
class Batch:
    """Packed pairs. Padding belongs to document -1, has weight 0 and sees only padding."""

    next_tokens_RW: Tensor
    """int64: x[t+1]"""
    hidden_RWC: Tensor
    """float32: h[t]"""
    targets_RWC: Tensor
    """float32: h[t+1]"""
    positions_RW: Tensor
    """int64: absolute position of h[t]"""
    offsets_RW: Tensor
    """int64: t, the place in the document"""
    documents_RW: Tensor
    """int64: which document; -1: padding"""
    weight_RW: Tensor
    """float32: 1 where the pair counts"""

    def to(self, device: str | torch.device) -> Batch:
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def cut(document: Document, limit: int) -> list[Document]:
    """Pieces of at most `limit` (two or more) tokens. Neighbours share a token, so that no pair is lost."""
    pieces: list[Document] = []
    low = 0
    while low == 0 or low + 1 < len(document):
        part = slice(low, low + limit)
        tensors = document.token_ids[part], document.hidden[part], document.loss_mask[part]
        pieces.append(Document(*tensors, document.position + low))
        low += limit - 1
    return pieces


def pair_weights(loss_mask: Tensor) -> Tensor:
    """uint8 [T] -> float32 [T - 1]: 1 where pair t counts (module docstring)."""
    return torch.cat([loss_mask[2:], loss_mask[-1:]]).to(torch.float32)


def count_pairs(document: Document) -> int:
    """Pairs that count."""
    return int(pair_weights(document.loss_mask).sum()) if len(document) > 1 else 0


def pack_rows(lengths: Sequence[int]) -> list[list[int]]:
    """First fit by falling length into rows as wide as the longest: indices of each row's documents."""
    width = max(lengths)
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, left in enumerate(free) if left >= lengths[index]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(width)
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows


def pack(documents: Sequence[Document]) -> Batch:
    """One batch of all these documents (each of two tokens or more)."""
    lengths = [len(document) - 1 for document in documents]
    rows, width = pack_rows(lengths), max(lengths)
    shape = (len(rows), width)
    tokens, positions, offsets = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    owners, weight = torch.full(shape, -1), torch.zeros(shape)
    hidden = torch.zeros(*shape, documents[0].hidden.shape[1])
    targets = torch.zeros_like(hidden)
    for row, members in enumerate(rows):
        low = 0
        for index in members:
            document, place = documents[index], (row, slice(low, low + lengths[index]))
            steps = torch.arange(lengths[index])
            tokens[place] = document.token_ids[1:].to(torch.int64)
            hidden[place] = document.hidden[:-1].to(torch.float32)
            targets[place] = document.hidden[1:].to(torch.float32)
            positions[place] = document.position + steps
            offsets[place] = steps
            owners[place] = index
            weight[place] = pair_weights(document.loss_mask)
            low += lengths[index]
    return Batch(tokens, hidden, targets, positions, offsets, owners, weight)


def split_documents(documents: Sequence[Document], limit: int) -> Iterator[list[Document]]:
    """Groups of neighbours with at most `limit` tokens; a longer document is a group of its own."""
    group: list[Document] = []
    size = 0
    for document in documents:
        if group and size + len(document) > limit:
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document)
    if group:
        yield group
