"""Work of several slots on one drafter, made into one: the average of their changes since the version that they have in
common, weighted by the tokens trained.

The common version cancels out of it: base + Σ share · (weights - base) = Σ share · weights, as shares sum to 1. What
was published meanwhile is a member like the slots' own work, so nobody waits for anybody: whoever judges next merges
its own work with the published version and with what others left behind (a slot that was recalled early, or whose
process died), and a merge that is no better than its best member is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tlt_pipeline.messages import WeightsPublished
from tlt_pipeline.models.drafter import Drafter

ROLLED_BACK = "rolled_back_from"
"""Metric of a version that repeats an earlier one: the version that drafted worse."""


@dataclass(frozen=True)
class Work:
    """A drafter that was trained on `tokens` tokens since version `parent`. `origin`: own, left_behind by another slot,
    or merged."""

    drafter: Drafter
    parent: int
    tokens: int
    origin: Literal["own", "left_behind", "merged"] = "own"


class Lineage:
    """Which version was trained from which, on how many tokens, as far as heard of."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}
        self._refused: set[int] = set()

    def note(self, published: WeightsPublished) -> None:
        self._known[published.version] = published.parent, int(published.metrics.get("tokens_trained", 0))
        if ROLLED_BACK in published.metrics:
            self._refused.add(int(published.metrics[ROLLED_BACK]))

    def is_refused(self, version: int) -> bool:
        """It, or a version that it comes from, was rolled back."""
        return not self._refused.isdisjoint(self._chain(version))

    def common(self, versions: Iterable[int]) -> int | None:
        """The newest version that all of these come from, or are."""
        chains = [set(self._chain(version)) for version in versions]
        return max(set.intersection(*chains), default=None) if chains else None

    def tokens(self, since: int, version: int) -> int:
        """Trained on the way from `since` to `version`."""
        return sum(self._known[each][1] for each in self._chain(version) if each > since and each in self._known)

    def _chain(self, version: int) -> list[int]:
        """The version, its parent, and so on; the last one's parent is not known."""
        chain = [version]
        while (known := self._known.get(chain[-1])) is not None and known[0] < chain[-1]:
            chain.append(known[0])
        return chain


@torch.no_grad()
def merge(works: Sequence[Work], lineage: Lineage) -> Drafter | None:
    """None: fewer than two have learned anything since their common version, or they have none that is known.
    Proposes the tokens that the first one proposes."""
    common = lineage.common(work.parent for work in works)
    if common is None:
        return None
    members = [(work.drafter, work.tokens + lineage.tokens(common, work.parent)) for work in works]
    members = [(drafter, tokens) for drafter, tokens in members if tokens > 0]
    if len(members) < 2:
        return None
    total = sum(tokens for _, tokens in members)
    merged = copy.deepcopy(works[0].drafter)
    for name, parameter in merged.named_parameters():
        parameter.zero_()
        for drafter, tokens in members:
            parameter.add_(drafter.get_parameter(name), alpha=tokens / total)
    return merged
