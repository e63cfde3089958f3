"""The chance that proposals are accepted, by drafter and draft position: shared, so that most strategies are known
without being tried.

A rate is the chance that a position's draw is among the proposals if all before it were. Chains of one drafter share
theirs. A tree's, by shape, start from the chain's plus a share of its misses, learned for all trees together. Each
size of the batch has its own, since what runs in the tail is other than what runs in the bulk, with all together as the
prior. What is old is forgotten.
Shapes: S = strategies, J = 1 + draft positions, B = running answers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.engine.strategies import StepFacts, Strategy, batch_bucket

Floats = NDArray[np.float64]

MEMORY_ROWS, MEMORY_STEPS = 200, 33
"""What was tried is forgotten over so many rows, and not faster than over so many steps."""
AFTER_RESTART, ROWS_AFTER_RESTART = 0.25, 8.0
"""Share of what is known of a drafter that outlives its change, and how many rows of it at most."""
OTHER_BATCHES = 0.25
PRIOR_ROWS, POOLED_ROWS = 4.0, 12.0
"""What a guess counts as, and what is known of other batch sizes or trees."""
EAGLE_PRIOR, NGRAM_PRIOR, NGRAM_LATER_PRIOR = 0.7, 0.4, 0.8
"""Rates before anything is known; once an n-gram matched one token, more follow."""
SHARE_PRIOR, SHARE_PRIOR_ROWS = 0.35, 20.0
"""Of a chain's misses, what a tree catches."""


class _Counts:
    """Of one drafter (and shape), by position: rows that were tried and that had it accepted."""

    def __init__(self, depth: int) -> None:
        self.accepted = [0.0] * depth
        self.tried = [0.0] * depth

    def add(self, rows: int, accepted: tuple[int, ...]) -> None:
        self.fade(max(1 - rows / MEMORY_ROWS, 1 - 1 / MEMORY_STEPS))
        alive = rows
        for position, count in enumerate(accepted):
            self.accepted[position] += count
            self.tried[position] += alive
            alive = count

    def rate(self, position: int, otherwise: float, rows: float) -> float:
        """`otherwise` counts as so many rows that were tried."""
        return (self.accepted[position] + rows * otherwise) / (self.tried[position] + rows)

    def fade(self, kept: float) -> None:
        self.accepted = [count * kept for count in self.accepted]
        self.tried = [count * kept for count in self.tried]

    def restart(self) -> None:
        self.fade(min(AFTER_RESTART, ROWS_AFTER_RESTART / max(self.tried[0], ROWS_AFTER_RESTART)))


class Acceptance:
    def __init__(self, strategies: tuple[Strategy, ...]) -> None:
        self.depth = max(each.depth for each in strategies)
        self._trees = sorted({str(each) for each in strategies if each.is_tree})
        self._groups = ["ngram", "eagle", *self._trees]
        self._caught, self._missed = 0.0, 0.0
        self._all = self._new()
        self._buckets: dict[int, dict[str, _Counts]] = {}
        self._group_S = np.array([self._groups.index(_group(each)) if each.depth else 0 for each in strategies])
        self._reached_SJ = np.array([[j <= each.depth for j in range(self.depth + 1)] for each in strategies], float)
        self._positions_J = np.arange(self.depth + 1)

    def learn(self, facts: StepFacts) -> None:
        if facts.strategy.is_tree:
            self._learn_share(facts)
        group = _group(facts.strategy)
        accepted = facts.accepted[: facts.strategy.depth] + (0,) * (facts.strategy.depth - len(facts.accepted))
        for counts in (self._all, self._bucket(facts.batch)):
            counts[group].add(facts.batch, accepted)

    def expected_tokens(self, batch: int, remaining_B: NDArray[np.int64]) -> Floats:
        """That a pass of all rows commits, bonus tokens included, with each strategy [S]; no row gets more than
        remains to it."""
        alive_SJ = self._alive(batch)
        if remaining_B.min() > self.depth:
            return alive_SJ.sum(1) * len(remaining_B)
        return alive_SJ @ (remaining_B[:, None] > self._positions_J).sum(0)

    def rows(self, batch: int) -> Floats:
        """Rows that say something of each strategy's first position, lately [S]; those of other batch sizes less."""
        here, pooled = self._bucket(batch), self._all
        rows = [here[group].tried[0] + OTHER_BATCHES * pooled[group].tried[0] for group in self._groups]
        return np.array(rows)[self._group_S]

    def restart(self) -> None:
        """Another version of the trained drafter."""
        for counts in (self._all, *self._buckets.values()):
            for group in self._groups[1:]:
                counts[group].restart()

    def _alive(self, batch: int) -> Floats:
        """The chance that so many proposals are accepted, or more [S, J]."""
        here, pooled = self._bucket(batch), self._all
        ngram, _ = self._chain_rates(here["ngram"], pooled["ngram"], NGRAM_PRIOR, NGRAM_LATER_PRIOR)
        eagle, eagle_pooled = self._chain_rates(here["eagle"], pooled["eagle"], EAGLE_PRIOR, None)
        rates = [ngram, eagle]
        for tree in self._trees:
            rates.append(self._tree_rates(here[tree], pooled[tree], eagle, eagle_pooled))
        return np.cumprod(np.array(rates), 1)[self._group_S] * self._reached_SJ

    def _chain_rates(
        self, here: _Counts, pooled: _Counts, prior: float, later: float | None
    ) -> tuple[list[float], list[float]]:
        """1 and the rates by position, at this batch size and at all. A position that was hardly tried is taken to be
        like the one before it, or like `later`."""
        rates, overall = [1.0], [1.0]
        for position in range(self.depth):
            overall.append(pooled.rate(position, prior, PRIOR_ROWS))
            rates.append(here.rate(position, overall[-1], POOLED_ROWS))
            prior = overall[-1] if later is None else later
        return rates, overall

    def _tree_rates(self, here: _Counts, pooled: _Counts, chain: list[float], chain_pooled: list[float]) -> list[float]:
        share = self._share()
        rates = [1.0]
        for position in range(self.depth):
            before = chain_pooled[position + 1]
            overall = pooled.rate(position, before + share * (1 - before), POOLED_ROWS)
            # the chain's rate here and this tree's lead over the chain elsewhere
            lead = max((overall - before) / max(1 - before, 0.01), 0.0)
            prior = chain[position + 1] + lead * (1 - chain[position + 1])
            rates.append(here.rate(position, min(prior, 1.0), POOLED_ROWS))
        return rates

    def _share(self) -> float:
        share = (self._caught + SHARE_PRIOR * SHARE_PRIOR_ROWS) / (self._missed + SHARE_PRIOR_ROWS)
        return min(max(share, 0.0), 0.95)

    def _learn_share(self, facts: StepFacts) -> None:
        _, chain = self._chain_rates(self._all["eagle"], self._all["eagle"], EAGLE_PRIOR, None)
        kept, alive = max(1 - facts.batch / MEMORY_ROWS, 1 - 1 / MEMORY_STEPS), facts.batch
        self._caught, self._missed = kept * self._caught, kept * self._missed
        for rate, count in zip(chain[1:], facts.accepted, strict=False):
            self._caught += count - alive * rate
            self._missed += alive * (1 - rate)
            alive = count

    def _bucket(self, batch: int) -> dict[str, _Counts]:
        bucket = batch_bucket(batch)
        if bucket not in self._buckets:
            self._buckets[bucket] = self._new()
        return self._buckets[bucket]

    def _new(self) -> dict[str, _Counts]:
        return {group: _Counts(self.depth) for group in self._groups}


def _group(strategy: Strategy) -> str:
    return str(strategy) if strategy.is_tree else strategy.drafter
