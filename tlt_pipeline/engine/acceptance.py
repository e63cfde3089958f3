"""The chance that proposals are accepted, by drafter and draft position: shared, so that most strategies are known
without being tried.

A rate is the chance that a position's draw is among the proposals if all before it were. Chains of one drafter share
theirs. A tree's, by shape, start from the chain's plus a share of its misses, learned for all trees together. Each
size of the batch has its own, since what runs in the tail is other than what runs in the bulk, with all together as the
prior. What is old is forgotten.
Shapes: S = strategies, G = groups that share rates (n-gram chains, eagle chains, each tree), D = draft positions,
J = 1 + D, B = running answers.
"""

from __future__ import annotations

from operator import add

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.engine.strategies import StepFacts, Strategy, batch_bucket

Floats = NDArray[np.float64]

MEMORY_ROWS, MEMORY_STEPS = 200, 33
"""What was tried is forgotten over so many rows, and not faster than over so many steps."""
OTHERS_KEPT = 0.997
"""The same for other groups' rates, each time that some are counted: what did badly once and isn't run because of it is
doubted again."""
AFTER_RESTART, ROWS_AFTER_RESTART = 0.25, 8.0
"""Share of what is known of a drafter that outlives its change, and how many rows of it at most."""
FLUSHED_AFTER = 4
"""Steps in a row of one group that are counted at once."""
OTHER_BATCHES = 0.25
PRIOR_ROWS, POOLED_ROWS = 4.0, 12.0
"""What a guess counts as, and what is known of other batch sizes or trees."""
EAGLE_PRIOR, NGRAM_PRIOR, NGRAM_LATER_PRIOR = 0.7, 0.4, 0.8
"""Rates before anything is known; once an n-gram matched one token, more follow."""
SHARE_PRIOR, SHARE_PRIOR_ROWS = 0.35, 20.0
"""Of a chain's misses, what a tree catches."""
NGRAM, EAGLE, TREES = 0, 1, 2
"""Groups; trees from the last one on."""


class _Counts:
    """By group and position: rows that were tried and that had it accepted."""

    def __init__(self, groups: int, depth: int) -> None:
        self.accepted_GD = np.zeros((groups, depth))
        self.tried_GD = np.zeros((groups, depth))

    def add(self, group: int, kept: float, tried: list[int], accepted: list[int]) -> None:
        for counts_GD, added in ((self.tried_GD, tried), (self.accepted_GD, accepted)):
            own_D = kept * counts_GD[group] + added
            counts_GD *= OTHERS_KEPT
            counts_GD[group] = own_D

    def rates(self, groups: slice, priors: Floats, rows: float) -> Floats:
        """`priors` count as so many rows that were tried."""
        return (self.accepted_GD[groups] + rows * priors) / (self.tried_GD[groups] + rows)

    def restart(self) -> None:
        first_G = self.tried_GD[EAGLE:, 0]
        kept_G1 = np.minimum(AFTER_RESTART, ROWS_AFTER_RESTART / np.maximum(first_G, ROWS_AFTER_RESTART))[:, None]
        self.accepted_GD[EAGLE:] *= kept_G1
        self.tried_GD[EAGLE:] *= kept_G1


class Acceptance:
    def __init__(self, strategies: tuple[Strategy, ...]) -> None:
        self.depth = max(each.depth for each in strategies)
        trees = list(dict.fromkeys(each for each in strategies if each.is_tree))
        self._group = {each: _group(each, trees) for each in strategies}
        self._group_S = np.array([self._group[each] for each in strategies])
        self._reached_SJ = np.array([[j <= each.depth for j in range(self.depth + 1)] for each in strategies], float)
        self._ngram_prior_D = np.full(self.depth, NGRAM_LATER_PRIOR)
        self._ngram_prior_D[:1] = NGRAM_PRIOR
        self._caught, self._missed = 0.0, 0.0
        self._groups = TREES + len(trees)
        self._all = _Counts(self._groups, self.depth)
        self._buckets: dict[int, _Counts] = {}
        self._pending_key = (NGRAM, 1)
        self._pending_steps, self._pending_rows = 0, 0
        self._tried, self._accepted = [0] * self.depth, [0] * self.depth

    def learn(self, facts: StepFacts) -> None:
        """`facts`: of a strategy with proposals."""
        depth, group = facts.strategy.depth, self._group[facts.strategy]
        # a step that proposed less had nothing accepted there
        accepted = [*facts.accepted[:depth], *[0] * (self.depth - min(len(facts.accepted), depth))]
        tried = [facts.batch, *accepted[: depth - 1], *[0] * (self.depth - depth)]
        if group >= TREES:
            self._learn_share(facts.batch, tried, accepted)
        key = (group, batch_bucket(facts.batch))
        if key != self._pending_key or self._pending_steps == FLUSHED_AFTER:
            self._flush()
            self._pending_key = key
        self._pending_steps += 1
        self._pending_rows += facts.batch
        self._tried = [*map(add, self._tried, tried)]
        self._accepted = [*map(add, self._accepted, accepted)]

    def _flush(self) -> None:
        """Counts what was learned of the last few steps at once: that is a good part of what learning costs."""
        if self._pending_steps:
            group, bucket = self._pending_key
            kept = _kept(self._pending_rows, self._pending_steps)
            for counts in (self._all, self._bucket(bucket)):
                counts.add(group, kept, self._tried, self._accepted)
        self._pending_steps, self._pending_rows = 0, 0
        self._tried, self._accepted = [0] * self.depth, [0] * self.depth

    def expected_tokens(self, batch: int, remaining_B: NDArray[np.int64]) -> Floats:
        """That a pass of all rows commits, bonus tokens included, with each strategy [S]; no row gets more than
        remains to it."""
        return limited_tokens(self.alive(batch), remaining_B)

    def rows(self, batch: int) -> Floats:
        """Rows that say something of each strategy's first position, lately [S]; those of other batch sizes less."""
        self._flush()
        rows_G = self._bucket(batch).tried_GD[:, 0] + OTHER_BATCHES * self._all.tried_GD[:, 0]
        return rows_G[self._group_S]

    def restart(self) -> None:
        """Another version of the trained drafter."""
        self._flush()
        for counts in (self._all, *self._buckets.values()):
            if self.depth:
                counts.restart()

    def alive(self, batch: int) -> Floats:
        """The chance that so many proposals are accepted, or more, with each strategy [S, J]."""
        self._flush()
        alive_GJ = np.ones((self._groups, self.depth + 1))
        self._rates(self._bucket(batch)).cumprod(1, out=alive_GJ[:, 1:])
        return alive_GJ[self._group_S] * self._reached_SJ

    def _rates(self, here: _Counts) -> Floats:
        """By group and position [G, D], at one batch size."""
        ngram, eagle, trees = slice(NGRAM, EAGLE), slice(EAGLE, TREES), slice(TREES, None)
        rates_GD = np.empty_like(here.tried_GD)
        ngram_D = self._all.rates(ngram, self._ngram_prior_D, PRIOR_ROWS)
        rates_GD[ngram] = here.rates(ngram, ngram_D, POOLED_ROWS)
        chain_D = self._chain_rates()
        rates_GD[eagle] = _chain_rates_here(here.accepted_GD[EAGLE], here.tried_GD[EAGLE], chain_D)
        if self._groups > TREES:
            missed_D = 1 - chain_D
            trees_TD = self._all.rates(trees, chain_D + self._share() * missed_D, POOLED_ROWS)
            # the chain's rate here, and the tree's lead over the chain at all sizes
            lead_TD = np.maximum((trees_TD - chain_D) / np.maximum(missed_D, 0.01), 0.0)
            prior_TD = rates_GD[eagle] + lead_TD * (1 - rates_GD[eagle])
            rates_GD[trees] = here.rates(trees, np.minimum(prior_TD, 1.0), POOLED_ROWS)
        return rates_GD

    def _chain_rates(self) -> Floats:
        """Of eagle chains at all batch sizes. A position that was hardly tried is taken to be like the one before."""
        rates, rate = [], EAGLE_PRIOR
        counted = zip(self._all.accepted_GD[EAGLE].tolist(), self._all.tried_GD[EAGLE].tolist(), strict=True)
        for accepted, tried in counted:
            rate = (accepted + PRIOR_ROWS * rate) / (tried + PRIOR_ROWS)
            rates.append(rate)
        return np.array(rates)

    def _share(self) -> float:
        share = (self._caught + SHARE_PRIOR * SHARE_PRIOR_ROWS) / (self._missed + SHARE_PRIOR_ROWS)
        return min(max(share, 0.0), 0.95)

    def _learn_share(self, rows: int, tried: list[int], accepted: list[int]) -> None:
        kept = _kept(rows, 1)
        self._caught, self._missed = kept * self._caught, kept * self._missed
        for rate, alive, count in zip(self._chain_rates().tolist(), tried, accepted, strict=False):
            self._caught += count - alive * rate
            self._missed += alive * (1 - rate)

    def _bucket(self, batch: int) -> _Counts:
        bucket = batch_bucket(batch)
        if bucket not in self._buckets:
            self._buckets[bucket] = _Counts(self._groups, self.depth)
        return self._buckets[bucket]


def limited_tokens(alive_SJ: Floats, remaining_B: NDArray[np.int64]) -> Floats:
    """Expected tokens of a pass with each strategy [S]: row by row as many as are accepted and remain to it."""
    positions = alive_SJ.shape[1]
    if remaining_B.min() >= positions:
        return alive_SJ.sum(1) * len(remaining_B)
    return alive_SJ @ (remaining_B[:, None] > np.arange(positions)).sum(0)


def _chain_rates_here(accepted_D: Floats, tried_D: Floats, chain_D: Floats) -> Floats:
    """Where proposals do better or worse than elsewhere at one position, they are taken to do so at the next: a batch
    of easy text is drafted deeper without deeper drafts having been tried in it."""
    rates, lead = [], 0.0
    for accepted, tried, chain in zip(accepted_D.tolist(), tried_D.tolist(), chain_D.tolist(), strict=True):
        prior = chain + lead * ((1 - chain) if lead > 0 else chain)
        rate = (accepted + POOLED_ROWS * prior) / (tried + POOLED_ROWS)
        lead = (rate - chain) / max(1 - chain if rate > chain else chain, 0.01)
        rates.append(rate)
    return np.array(rates)


def _kept(rows: int, steps: int) -> float:
    return max(1 - rows / MEMORY_ROWS, 1 - steps / MEMORY_STEPS)


def _group(strategy: Strategy, trees: list[Strategy]) -> int:
    if strategy.is_tree:
        return TREES + trees.index(strategy)
    return EAGLE if strategy.drafter == "eagle" else NGRAM
