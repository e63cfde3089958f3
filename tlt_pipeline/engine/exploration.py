"""Which strategy is worth a trial although another one promises more, and whether there is time left for it.

Time lost by trials is bounded: every step earns a small share of its own time, every trial pays what it is expected to
lose. So what costs little is tried often, what is hopeless seldom. A trial is given to a kind of strategy that didn't
run for long, or since its drafter changed, and to those that may well be the best, given how little is known of them.
Shapes: S = strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.engine.strategies import Strategy

Floats = NDArray[np.float64]
Kind = Literal["off", "ngram", "eagle", "tree"]

EARNED = 0.015
"""Share of the time that may be lost by trials."""
AT_START, AT_MOST, DEBT = 8.0, 20.0, 8.0
"""Steps that may be lost at the start; that can be saved up; that are owed at most where a trial lost more than was
expected."""
TRIAL, EAGLE_TRIAL = 2, 4
"""Steps of a trial: the first one of a drafter that didn't run has to catch up."""
TRIED, TRIED_IF_DUE = 0.06, 0.3
"""Chance of a trial in a step in which one is worth its time; if a kind is to be tried again."""
RETRIED_AFTER = 500
"""A kind is tried again after so many steps in which it didn't run."""
UNSURE_TIME, UNSURE_TOKENS, UNSURE_ROWS, UNSURE_LEVELS = 0.1, 0.14, 4.0, 4
"""Of a strategy that was never measured, relative; of tokens for each level of proposals, up to so many, and halved by
three times so many rows."""
OPTIMISM = 2.0
"""So many of these may the truth be better than the prediction."""


class Exploration:
    def __init__(self, strategies: tuple[Strategy, ...], seed: int) -> None:
        self._random = Random(seed)
        self._kinds: list[Kind] = [_kind(each) for each in strategies]
        self._kind_S = {kind: np.array([each == kind for each in self._kinds]) for kind in dict.fromkeys(self._kinds)}
        self._due: dict[Kind, int] = dict.fromkeys(self._kinds, 0)
        self.trial_S = np.array([EAGLE_TRIAL if each.drafter == "eagle" else TRIAL for each in strategies])
        self._eagle_S = np.array([float(each.drafter == "eagle") for each in strategies])
        self._step = 0
        self._seconds: float | None = None

    def pick(self, rates_S: Floats, seconds_S: Floats, once: float, unsure_S: Callable[[], Floats]) -> int:
        """The strategy to try for `trial_S` steps, or -1. rates_S: expected tokens a second, 0 where it isn't
        available; seconds_S: of a step; once: seconds that an eagle strategy's first step takes more; unsure_S: how
        far, relative, the rates may be off."""
        if self._seconds is None:
            self._seconds = AT_START * float(seconds_S[0])
        due = [kind for kind, step in self._due.items() if step <= self._step]
        if self._random.random() >= (TRIED_IF_DUE if due else TRIED):
            return -1
        best = float(rates_S.max())
        lost_S = self.trial_S * seconds_S * (1 - rates_S / best) + once * self._eagle_S
        possible_S = (rates_S > 0) & (lost_S <= self._seconds)
        for kind in due:
            of_kind_S = np.where(self._kind_S[kind] & possible_S, rates_S, 0.0)
            if of_kind_S.any():
                return self._pay(int(of_kind_S.argmax()), lost_S)
        gain_S = rates_S * (1 + OPTIMISM * unsure_S()) / best - 1.01
        worth_S = np.where(possible_S & (rates_S < best) & (gain_S > 0), gain_S / (lost_S + 0.05 * seconds_S), 0.0)
        if not worth_S.any():
            return -1
        return self._pay(self._random.choices(range(len(worth_S)), worth_S.tolist())[0], lost_S)

    def measured(self, index: int, expected: float) -> None:
        """A step is done; `expected`: the seconds that it should have taken."""
        self._step += 1
        self._due[self._kinds[index]] = self._step + RETRIED_AFTER
        if self._seconds is not None:
            self._seconds = min(self._seconds + EARNED * expected, AT_MOST * expected)

    def charge(self, seconds: float, expected: float) -> None:
        """A trial's step took longer than expected."""
        if self._seconds is not None:
            self._seconds = max(self._seconds - (seconds - expected), min(self._seconds, -DEBT * expected))

    def new_drafter(self) -> None:
        for kind in ("eagle", "tree"):
            if kind in self._due:
                self._due[kind] = self._step

    def _pay(self, index: int, lost_S: Floats) -> int:
        assert self._seconds is not None
        self._seconds -= float(lost_S[index])
        # whether or not its steps get measured
        self._due[self._kinds[index]] = self._step + RETRIED_AFTER
        return index


def unsure(steps_S: Floats, rows_S: Floats, depth_S: Floats) -> Floats:
    """How far predicted rates may be off, relative [S]: of strategies of these depths that were measured in so many
    steps, and whose acceptance was in so many rows."""
    of_tokens_S = UNSURE_TOKENS * np.minimum(depth_S, UNSURE_LEVELS)
    return np.sqrt(UNSURE_TIME**2 / (1 + steps_S) + of_tokens_S**2 / (1 + rows_S / UNSURE_ROWS))


def _kind(strategy: Strategy) -> Kind:
    return "tree" if strategy.is_tree else strategy.drafter
