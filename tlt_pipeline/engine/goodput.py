"""Goodput: the strategy with the most expected tokens a second, predicted from models that all strategies share.

Tokens of a step come from acceptance rates (`acceptance`), limited by what remains to each answer; its time from a
cost model (`step_time`). Both are learned while decoding, so that most strategies are predicted without being tried;
a few trials (`exploration`) keep them honest.
Shapes: S = strategies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.engine.acceptance import Acceptance, limited_tokens
from tlt_pipeline.engine.exploration import Exploration, unsure
from tlt_pipeline.engine.step_time import StepTime
from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, Strategy

LEAD = 0.15
"""Another strategy is switched to once its lead over the present one, summed over steps, is so many steps' worth: a
large one at once, one of 3 % after five steps, so that neither noise nor a batch that swings around a threshold makes
it go to and fro, and none is waited for long."""
NO_LEAD = 0.005
"""Less of a lead isn't counted."""
GOES_ON, PROLONGED = 2, 20
"""Steps for which a trial that does well is prolonged, and how often."""
CATCH_UP_LEARNED = 0.3
"""Of the seconds a row that a drafter's first step took more, because it didn't run before."""
AS_BEFORE = 7
"""Steps for which a prediction holds if the batch is the same: a decision shouldn't cost what it gains."""


@dataclass
class _Prediction:
    """`alive_SJ`: the chance of so many accepted proposals; `rates_S`: tokens a second, 0 where not available; `steps`:
    for which it still holds; `short`: an answer may get fewer tokens than are proposed."""

    batch: int
    seconds_S: NDArray[np.float64]
    alive_SJ: NDArray[np.float64]
    rates_S: NDArray[np.float64]
    steps: int
    short: bool = False


class Goodput:
    def __init__(self, strategies: tuple[Strategy, ...], max_batch: int, seed: int) -> None:
        """`max_batch`: with more running answers it never speculates."""
        self.strategies, self.max_batch = strategies, max_batch
        self.time, self.acceptance = StepTime(strategies), Acceptance(strategies)
        self.exploration = Exploration(strategies, seed)
        self._index = {strategy: index for index, strategy in enumerate(strategies)}
        self._depth_S = np.array([float(each.depth) for each in strategies])
        self._available: tuple[Strategy, ...] = ()
        self._available_S = np.zeros(len(strategies))
        self._current, self._lead = 0, 0.0
        self._trial, self._trial_steps = 0, 0
        self._prolonged = 0
        self._ran, self._catch_up = 0, 0.0
        self._prediction: _Prediction | None = None

    def choose(self, state: BatchState) -> Strategy:
        if state.available != self._available:
            self._available = state.available
            self._available_S = np.array([float(each in state.available) for each in self.strategies])
            self._prediction = None
        only_off = state.batch > self.max_batch or not self._available_S[1:].any() or not self.time.known
        if only_off or not len(state.remaining_B):
            self._prediction = None
            return OFF if OFF in state.available else state.available[0]
        return self.strategies[self._try(self._predict(state), state.batch)]

    def _predict(self, state: BatchState) -> _Prediction:
        before, rows = self._prediction, state.remaining_B
        short = int(rows.min()) <= self.acceptance.depth
        if before and before.steps and before.batch == state.batch:
            before.steps -= 1
            if short or before.short:
                before.rates_S = limited_tokens(before.alive_SJ, rows) / before.seconds_S * self._available_S
        else:
            alive_SJ, seconds_S = self.acceptance.alive(state.batch), self.time.predict(state.batch, state.context)
            rates_S = limited_tokens(alive_SJ, rows) / seconds_S * self._available_S
            holds = AS_BEFORE if self.time.settled else 0
            before = self._prediction = _Prediction(state.batch, seconds_S, alive_SJ, rates_S, holds)
        before.short = short
        return before

    def _try(self, predicted: _Prediction, batch: int) -> int:
        """A trial's strategy, or the best one."""
        best = self._switch(predicted.rates_S)
        if self._trial_steps and self._available_S[self._trial]:
            self._trial_steps -= 1
            return self._trial
        behind = self.strategies[self._ran].drafter != "eagle"
        tried = self.exploration.pick(
            predicted.rates_S,
            predicted.seconds_S,
            batch * self._catch_up if behind else 0.0,
            lambda: unsure(self.time.steps(batch), self.acceptance.rows(batch), self._depth_S),
        )
        if tried < 0 or tried == best:
            return best
        self._trial, self._trial_steps = tried, int(self.exploration.trial_S[tried]) - 1
        self._prolonged = PROLONGED
        return tried

    def _switch(self, rates_S: NDArray[np.float64]) -> int:
        best = int(rates_S.argmax())
        if not self._available_S[self._current]:
            self._current, self._lead = best, 0.0
        lead = float(rates_S[best] / rates_S[self._current]) - 1
        self._lead = self._lead + lead if lead > NO_LEAD else 0.0
        if self._lead > LEAD:
            self._current, self._lead = best, 0.0
        return self._current

    def measured(self, facts: StepFacts) -> None:
        index = self._index.get(facts.strategy)
        if index is None or facts.batch < 1 or not 0 < facts.seconds < np.inf:
            return
        if facts.strategy.depth:
            self.acceptance.learn(facts)
        expected = facts.seconds if self._prediction is None else float(self._prediction.seconds_S[index])
        self.exploration.measured(index, expected)
        if facts.counts:
            self.time.learn(facts, index)
        else:
            caught_up = max(facts.seconds - expected, 0.0) / facts.batch
            self._catch_up += CATCH_UP_LEARNED * (caught_up - self._catch_up)
        self._ran = index
        if index != self._current:
            self._judge_trial(facts, expected)

    def _judge_trial(self, facts: StepFacts, expected: float) -> None:
        """A trial that does better than the best strategy promises goes on: it pays, and a few steps prove little."""
        if facts.seconds > expected:
            self.exploration.charge(facts.seconds, expected)
        if self._prediction:
            self._prediction.steps = 0  # it learns from a trial at once
        if self._prediction and facts.committed > facts.seconds * self._prediction.rates_S.max() and self._prolonged:
            self._trial_steps = max(self._trial_steps, GOES_ON)
            self._prolonged -= 1

    def new_drafter(self) -> None:
        self.acceptance.restart()
        self.exploration.new_drafter()
