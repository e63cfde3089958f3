"""Which drafter is worth publishing: a trainer's own, another slot's, or the merge of all, each against the published
version on the same held-out data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tlt_pipeline.drafter.evaluation import HeldOut
from tlt_pipeline.drafter.merging import Lineage, Work, merge
from tlt_pipeline.models.drafter import Drafter

Evaluate = Callable[[Drafter], HeldOut | None]
"""None: stopped."""
CLEAR = 2.0
"""Standard errors. A gain below that may be the held-out documents' luck, and of many tries some have it: published,
such versions drafted worse than the one before."""


@dataclass(frozen=True)
class Judgement:
    """`candidate`: the best that could be published; `better`: that one, where it isn't the trainer's own."""

    candidate: HeldOut
    own: HeldOut
    published: HeldOut
    worth: bool
    better: Work | None = None


@dataclass(frozen=True)
class Candidate:
    """A drafter to publish: trained from version `parent`, on so many tokens, with that policy's head. `own`,
    `own_tokens`: what the trainer itself had at that moment, on its line number `line`."""

    drafter: Drafter
    parent: int
    policy_version: int
    tokens_trained: int
    own: Drafter
    own_tokens: int
    line: int


class Judge:
    """`counts`: what was left undone, and how often merging was tried and helped."""

    def __init__(self, min_gain: float, counts: Counter[str]) -> None:
        self._min_gain, self._counts = min_gain, counts
        self._published: tuple[Hashable, HeldOut] | None = None

    def compare(
        self, own: Work, published: Work, others: Sequence[Work], lineage: Lineage, evaluate: Evaluate, key: Hashable
    ) -> Judgement | None:
        """None: stopped. The published version is evaluated again only where `key` is another one."""
        if self._published is None or self._published[0] != key:
            found = evaluate(published.drafter)
            self._published = None if found is None else (key, found)
        found = None if self._published is None else evaluate(own.drafter)
        if self._published is None or found is None:
            self._counts["judgement_cut_short"] += 1
            return None
        bar = self._published[1]
        better, candidate = self._find_better(found, bar, own, published, others, lineage, evaluate)
        gain, error = candidate.gain_over(bar)
        return Judgement(candidate, found, bar, gain > max(self._min_gain, CLEAR * error), better)

    def _find_better(
        self,
        found: HeldOut,
        bar: HeldOut,
        own: Work,
        published: Work,
        others: Sequence[Work],
        lineage: Lineage,
        evaluate: Evaluate,
    ) -> tuple[Work | None, HeldOut]:
        """A merge has to be better than each of its members. None: the trainer's own is the best."""
        best: tuple[Work | None, HeldOut] = None, found
        for work in others:
            alone = evaluate(work.drafter)
            if alone is not None and alone.loss < best[1].loss:
                best = work, alone
        merged = merge([own, published, *others], lineage)
        together = None if merged is None else evaluate(merged)
        if merged is not None and together is not None:
            self._counts["merge_tried"] += 1
            if together.loss < min(best[1].loss, bar.loss):
                self._counts["merge_better"] += 1
                tokens = own.tokens + sum(work.tokens for work in others)
                best = Work(merged, published.parent, tokens, "merged"), together
        return best
