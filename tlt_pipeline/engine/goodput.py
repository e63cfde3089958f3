"""Goodput: the strategy with the most expected tokens a second, predicted from a cost model that all strategies share.

Tokens a pass come from acceptance rates by draft position; the time of a pass is linear in what it computes (rows
verified, rows times KV length, draft steps, rows drafted), fitted online by recursive least squares. So most strategies
are predicted without being tried (the idea of SmartSpec, arXiv 2406.14066, with both parts learned while decoding).
Shapes: F = features of a step.
"""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, Strategy

EXPLORED = 0.03
"""Share of the steps that try a neighbour of the best strategy: keeps both models honest."""
HYSTERESIS = 0.03
"""Another strategy must promise so much more to be switched to."""
FORGETTING = 0.997
"""Share that a time measured keeps of its weight at the next one."""
ACCEPTANCE_KEPT = 0.97
"""Share that an acceptance measured keeps of its weight at the next step: the answers that run change."""
AT_RESTART = 0.25
"""Share of what is known of acceptance that outlives a change of drafter."""
PRIOR_RATE, PRIOR_ROWS = 0.75, 4.0
OUTLIER = 3.0
"""A step that took so many times what was predicted was interrupted; it is counted as no more."""


class StepTime:
    """Seconds of a decode step, by recursive least squares with forgetting."""

    def __init__(self) -> None:
        self.known = 0
        self._weights_F = np.zeros(5)
        self._covariance_FF = np.eye(5) * 1e3

    def predict(self, batch: int, context: int, depth: int) -> float:
        return max(float(self._features(batch, context, depth) @ self._weights_F), 1e-6)

    def learn(self, facts: StepFacts) -> None:
        features_F = self._features(facts.batch, facts.context, facts.strategy.depth)
        predicted, seconds = float(features_F @ self._weights_F), facts.seconds
        if self.known >= 4 * len(features_F) and predicted > 0:
            seconds = min(seconds, OUTLIER * predicted)
        # in relative terms, so that large batches don't rule the fit
        scale = 1.0 / max(seconds, 1e-6)
        features_F, error = features_F * scale, (seconds - predicted) * scale
        gain_F = self._covariance_FF @ features_F
        gain_F /= FORGETTING + features_F @ gain_F
        self._weights_F += gain_F * error
        covariance_FF = (self._covariance_FF - np.outer(gain_F, features_F @ self._covariance_FF)) / FORGETTING
        if np.trace(covariance_FF) < 1e6:  # directions that nothing excites don't grow without bound
            self._covariance_FF = (covariance_FF + covariance_FF.T) / 2
        self.known += 1

    @staticmethod
    def _features(batch: int, context: int, depth: int) -> NDArray[np.float64]:
        rows = batch * (depth + 1)
        return np.array([1.0, rows, rows * context / 256, depth, batch * depth]) * 1e-3


class Acceptance:
    """The chance that a proposal is accepted if those before it were, by position, with forgetting. Kept by the size of
    the batch: what runs in the tail is other than what runs in the bulk. A size that was hardly seen is taken to be
    like all together, a position that was hardly tried like the one before it."""

    def __init__(self, depth: int) -> None:
        self._all = _Counts(depth)
        self._depth = depth
        self._buckets: dict[int, _Counts] = {}

    def learn(self, facts: StepFacts) -> None:
        for counts in (self._all, self._bucket(facts.batch)):
            counts.add(facts.batch, facts.accepted)

    def expected_tokens(self, batch: int) -> list[float]:
        """Committed a row and pass, bonus token included, for every depth from 0."""
        expected, alive, rate = [1.0], 1.0, PRIOR_RATE
        bucket = self._bucket(batch)
        for position in range(self._depth):
            overall = self._all.rate(position, rate)
            rate = bucket.rate(position, overall)
            alive *= rate
            expected.append(expected[-1] + alive)
        return expected

    def restart(self) -> None:
        for counts in (self._all, *self._buckets.values()):
            counts.fade(AT_RESTART)

    def _bucket(self, batch: int) -> _Counts:
        return self._buckets.setdefault(batch.bit_length(), _Counts(self._depth))


class _Counts:
    def __init__(self, depth: int) -> None:
        self._accepted = np.zeros(depth)
        self._tried = np.zeros(depth)

    def add(self, rows: int, accepted: tuple[int, ...]) -> None:
        self.fade(ACCEPTANCE_KEPT)
        alive = rows
        for position, count in enumerate(accepted):
            self._accepted[position] += count
            self._tried[position] += alive
            alive = count

    def rate(self, position: int, otherwise: float) -> float:
        """`otherwise` counts as PRIOR_ROWS that were tried."""
        return float((self._accepted[position] + PRIOR_ROWS * otherwise) / (self._tried[position] + PRIOR_ROWS))

    def fade(self, kept: float) -> None:
        self._accepted *= kept
        self._tried *= kept


class Goodput:
    def __init__(self, strategies: tuple[Strategy, ...], max_batch: int, seed: int) -> None:
        """`max_batch`: with more running answers it never speculates."""
        self.strategies, self.max_batch = strategies, max_batch
        self.time, self.acceptance = StepTime(), Acceptance(max(each.depth for each in strategies))
        self._random = Random(seed)
        self._current = OFF
        deepest, middle = strategies[-1], strategies[len(strategies) // 2]
        # what the time model needs to tell its parts from each other
        self._first = [deepest, OFF, middle, deepest, OFF, middle]

    def choose(self, state: BatchState) -> Strategy:
        batch, context, room = state.batch, state.context, int(state.remaining_B.max())
        if batch > self.max_batch:
            return OFF
        if self._first:
            first = self._first.pop()
            return first if first in state.available else OFF
        allowed = [strategy for strategy in state.available if strategy.depth <= max(room - 1, 1)]
        tokens = self.acceptance.expected_tokens(batch)
        rates = [batch * tokens[each.depth] / self.time.predict(batch, context, each.depth) for each in allowed]
        best = int(np.argmax(rates))
        if self._current in allowed and rates[best] < (1 + HYSTERESIS) * rates[allowed.index(self._current)]:
            best = allowed.index(self._current)
        self._current = allowed[best]
        if self._random.random() < EXPLORED:
            return allowed[min(max(best + self._random.choice((-2, -1, 1, 2)), 0), len(allowed) - 1)]
        return self._current

    def measured(self, facts: StepFacts) -> None:
        if facts.accepted:
            self.acceptance.learn(facts)
        if facts.counts:
            self.time.learn(facts)

    def new_drafter(self) -> None:
        self.acceptance.restart()
