"""Which tokens a drafter may propose: the most frequent of the policy's answers (FR-Spec, arXiv 2502.14856; EAGLE-3).

Scoring the whole vocabulary is most of what a draft step costs, and of what training costs (SmolLM2: 28 of 32 million
weights read a step), while an RL task's answers use little of it. No weight of the drafter depends on the choice, so it
changes from one version to the next (EAGLE-3's has a head of its own, and keeps what it began with). Shapes: V =
vocabulary, v = draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tlt_pipeline.drafter.shards import Document

FEWEST = 1024
"""Fewer than these aren't faster."""
SPARE = 2
"""Room for so many times the tokens that were seen: answers to come use others."""
COVERED = 0.998
"""A choice is kept while it has this share of the answers' tokens, or as good as any choice has."""


def count_tokens(documents: Iterable[Document], vocab_size: int) -> Tensor:
    """How often each token stands in the answers, int64 [V]."""
    answers = [document.token_ids[document.loss_mask.bool()] for document in documents]
    tokens_N = torch.cat(answers) if answers else torch.zeros(0, dtype=torch.int32)
    return torch.bincount(tokens_N, minlength=vocab_size)


def coverage(draft_ids_v: Tensor | None, counts_V: Tensor) -> float:
    """Share of the counted tokens that may be proposed."""
    total = int(counts_V.sum())
    if draft_ids_v is None or not total:
        return 1.0
    return int(counts_V[draft_ids_v.cpu()].sum()) / total


def choose_vocabulary(
    counts_V: Tensor, limit: int, current_v: Tensor | None, fewest: int | None = None
) -> Tensor | None:
    """-> ascending ids of at most `limit` tokens, int64 [v]; None: the whole vocabulary. The ids that were never seen
    and fill it up are the lowest, the most frequent ones in BPE vocabularies, up to `fewest` (None: FEWEST) or more.
    `current_v` is kept while it will do."""
    vocab, seen = len(counts_V), int((counts_V > 0).sum())
    size = min(limit, max(FEWEST if fewest is None else fewest, SPARE * seen))
    if not seen or size > vocab // 2:
        return None
    best_v = torch.sort(counts_V, descending=True, stable=True).indices[:size].sort().values
    will_do = min(COVERED, coverage(best_v, counts_V))
    if current_v is not None and len(current_v) <= limit and coverage(current_v, counts_V) >= will_do:
        return current_v
    return best_v
