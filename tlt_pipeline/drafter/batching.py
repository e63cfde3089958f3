"""From documents to batches: which pairs the drafter learns from, packed into rows.

The pairing, the same as in the engine. In a document of T tokens x and features h, pair t (0 ≤ t ≤ T-2) is

    input   embedding of x[t+1], feature h[t], at h[t]'s position
    target  feature h[t+1], and what the policy says after reading x[t+1]: softmax(head(norm(h[t+1])))

That distribution is the one token t+2 is drawn from, so pair t counts exactly if token t+2 belongs to the answer.
The last pair's token t+2 lies behind the document: it counts if token t+1 belongs to the answer (an answer's
last document ends with the last token the policy read, which is the one before the stop token).

A batch is one row of documents laid end to end, as wide as they are: what is done a token (products, norms, losses)
has no padding, and attention is computed document by document (DocumentAttention), which costs the sum of the squared
lengths instead of the squared width; positions restart with each document. Measured on the quickstart's answers (mean
63 tokens, longest 387, rows of 512, one thread), tokens trained a second against this: one masked row 0.77, rows as
wide as the longest document 0.76, a row a document (padded) 0.46. Shapes: R = rows (1), W = width, C = hidden size,
H = query heads, K = key/value heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.drafter.shards import Document


@dataclass(frozen=True)
class Batch:
    """Packed pairs."""

    lengths: tuple[int, ...]
    """Pairs of each document, in the order of the row."""
    next_tokens_RW: Tensor
    """int64: x[t+1]"""
    hidden_RWC: Tensor
    """float32: h[t], for a drafter that taps the policy with what it taps before it: more numbers than C"""
    targets_RWC: Tensor
    """float32: h[t+1]"""
    positions_RW: Tensor
    """int64: absolute position of h[t]"""
    offsets_RW: Tensor
    """int64: t, the place in the document"""
    documents_RW: Tensor
    """int64: which document"""
    weight_RW: Tensor
    """float32: 1 where the pair counts"""

    def to(self, device: str | torch.device) -> Batch:
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


class DocumentAttention:
    """Causal attention inside each document of a row."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, W, H, D], k and v [R, W, K, D] -> [R, W, H, D]."""
        parts = zip(*(each.transpose(1, 2).split(self.lengths, 2) for each in (q, k, v)), strict=True)
        read = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(read, 2).transpose(1, 2)


def cut(document: Document, limit: int) -> list[Document]:
    """Pieces of at most `limit` (two or more) tokens. Neighbours share a token, so that no pair is lost."""
    pieces: list[Document] = []
    low = 0
    while low == 0 or low + 1 < len(document):
        part = slice(low, low + limit)
        tensors = document.token_ids[part], document.hidden[part], document.loss_mask[part]
        pieces.append(Document(*tensors, document.position + low, document.group))
        low += limit - 1
    return pieces


def pair_weights(loss_mask: Tensor) -> Tensor:
    """uint8 [T] -> float32 [T - 1]: 1 where pair t counts (module docstring)."""
    return torch.cat([loss_mask[2:], loss_mask[-1:]]).to(torch.float32)


def count_pairs(document: Document) -> int:
    """Pairs that count."""
    return int(pair_weights(document.loss_mask).sum()) if len(document) > 1 else 0


def pack(documents: Sequence[Document], hidden_size: int | None = None) -> Batch:
    """One row of all these documents (each of two tokens or more). `hidden_size`: C, where features have more numbers
    than that; the last C are the target."""
    targets = slice(None if hidden_size is None else -hidden_size, None)
    lengths = tuple(len(document) - 1 for document in documents)
    steps = [torch.arange(length) for length in lengths]
    positions = [document.position + step for document, step in zip(documents, steps, strict=True)]
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Batch(
        lengths,
        _row([document.token_ids[1:] for document in documents]).to(torch.int64),
        _row([document.hidden[:-1] for document in documents]).to(torch.float32),
        _row([document.hidden[1:, targets] for document in documents]).to(torch.float32),
        _row(positions),
        _row(steps),
        owners.unsqueeze(0),
        _row([pair_weights(document.loss_mask) for document in documents]),
    )


def _row(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).unsqueeze(0)


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
