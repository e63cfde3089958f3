"""Seconds of a decode step, learned while decoding: linear in what a step computes, corrected where it was measured.

Three layers, so that what was measured counts most and what was not is still predicted (the idea of SmartSpec, arXiv
2406.14066): a linear model that all strategies and batch sizes share (recursive least squares); a ratio to it for each
strategy and batch bucket, since real machines have knees and stairs; the machine's present speed, common to all, so
that strategies measured in good and bad minutes compare.
Shapes: S = strategies, F = features of a step.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.engine.strategies import StepFacts, Strategy, batch_bucket

Floats = NDArray[np.float64]

PRIOR_F = np.array([1.0, 0.02, 0.02, 0.01, 0.12, 0.01, 0.15, 0.01, 0.005, 0.01])
"""What a step's features cost relative to the first before anything is known: the step itself; a row; a row verified,
and that with 256 tokens of context; a draft pass; a row drafted; a tree, and that for each row (mask, reranking,
compaction); a row's n-gram lookup; a row verified beyond KNEE of them."""
NOISE = 0.1
"""Of a time measured, relative; the prior's own is 1."""
FORGETTING = 0.995
"""Share that what is known keeps of its weight at the next step, in the direction that this one informs."""
RATIO_KEPT, RATIO_PRIOR = 0.97, 5.0
"""The same for a strategy's ratio at each of its steps; steps that the model counts as."""
OTHERS_KEPT = 0.999
"""The same for what is known of the other strategies at this batch size: what was measured in a bad moment, and isn't
run because of it, is doubted again."""
LARGEST_RATIO = 20.0
RIDGE = 1e-6 * np.eye(len(PRIOR_F))
"""Whatever was measured, the fit can be solved."""
ALIKE = (0.3, 0.1)
"""What a step says of another strategy of the same drafter, and of another drafter, if they verify as much."""
WIDTH_KEPT = 0.95
SPEED_LEARNED = 0.05
SPEEDS = (0.25, 8.0)
"""What the machine's speed may do to a step's time."""
FIRST_STEPS = 16
"""So many are fitted anew with each one more, from a prior of the scale that most of them have."""
OUTLIER, FIRST_OUTLIER = 1.3, 2.0
"""A step that took so many times what was predicted was interrupted, or the first of its kind, which compiles and
allocates; it is counted as no more, unless the strategy's step before it was as slow. Of the first steps, the prior
says little."""
SETTLED_STEPS, KNOWN_STEPS, SELDOM = 100, 10, 4
"""After so many steps, of all and of a strategy at a batch size, only every fourth one in a row is learned from."""
KNEE = 32
"""Rows from which another slope is fitted: few are as fast as one."""


class _Ratios:
    """Sums over a bucket's steps, by strategy: seconds, features, number; the last step's seconds relative to the
    model's."""

    def __init__(self, strategies: int) -> None:
        self.seconds_S = np.zeros(strategies)
        self.features_SF = np.zeros((strategies, len(PRIOR_F)))
        self.steps_S = np.zeros(strategies)
        self.last_S = np.zeros(strategies)


class StepTime:
    def __init__(self, strategies: tuple[Strategy, ...]) -> None:
        self.known = 0
        self._table_SF = np.array([_parts(each, 1 + each.verify) for each in strategies])
        self._alike_SS = _alike(strategies)
        self._weights_F = PRIOR_F.copy()
        self._information_FF = _prior_information(1.0)
        self._first: list[tuple[Floats, float]] = []
        self._speed = 1.0
        self._last = -1
        self._buckets: dict[int, _Ratios] = {}
        # n-gram steps verify as many tokens as the longest match has: a share of what they might
        self._ngrams = np.array([index for index, each in enumerate(strategies) if each.drafter == "ngram"], np.int64)
        self._ngram_depths = np.array([float(strategies[index].depth) for index in self._ngrams])
        self._ngram_width: dict[int, float] = {}

    @property
    def settled(self) -> bool:
        return self.known >= SETTLED_STEPS

    def predict(self, batch: int, context: int) -> Floats:
        """Seconds of a step with each strategy [S]."""
        bucket = batch_bucket(batch)
        if len(self._ngrams):
            width_N = 1.0 + self._ngram_depths * self._ngram_width.get(bucket, 1.0)
            self._table_SF[self._ngrams, 2:4] = width_N[:, None]
        self._table_SF[:, -1] = np.maximum(batch * self._table_SF[:, 2] - KNEE, 0.0)
        model_S = self._table_SF @ (_scales(batch, context) * self._weights_F)
        ratios = self._ratios(bucket)
        weighted_S = self._weighted(ratios)
        ratio_S = (self._alike_SS @ weighted_S + RATIO_PRIOR) / (self._alike_SS @ ratios.steps_S + RATIO_PRIOR)
        return np.maximum(self._speed * model_S * ratio_S, 1e-9)

    def steps(self, batch: int) -> Floats:
        """How often each strategy, or one much like it, was measured at this batch size, lately [S]."""
        return self._alike_SS @ self._ratios(batch_bucket(batch)).steps_S

    def learn(self, facts: StepFacts, index: int) -> None:
        """`index`: of the strategy."""
        bucket = batch_bucket(facts.batch)
        ratios = self._ratios(bucket)
        known_well = self.settled and index == self._last and ratios.steps_S[index] > KNOWN_STEPS
        self._last = index
        self.known += 1
        if known_well and self.known % SELDOM:
            return
        if facts.strategy.drafter == "ngram":
            share, before = (facts.verified - 1) / facts.strategy.depth, self._ngram_width.get(bucket, 1.0)
            self._ngram_width[bucket] = WIDTH_KEPT * before + (1 - WIDTH_KEPT) * share
        features_F = np.array(_parts(facts.strategy, facts.verified)) * _scales(facts.batch, facts.context)
        features_F[-1] = max(facts.batch * facts.verified - KNEE, 0)
        seconds = max(facts.seconds, 1e-6)
        if self.known <= FIRST_STEPS:
            self._fit_first(features_F, seconds)
        else:
            self._learn(features_F, seconds, ratios, index, SELDOM if known_well else 1)

    def _learn(self, features_F: Floats, seconds: float, ratios: _Ratios, index: int, stands_for: int) -> None:
        """`stands_for`: so many steps."""
        model = max(self._speed * float(features_F @ self._weights_F), 1e-9)
        predicted = model * self._ratio(ratios, index)
        last, ratios.last_S[index] = float(ratios.last_S[index]), seconds / model
        seconds = min(seconds, OUTLIER * max(predicted, last * model))
        self._follow_speed(seconds / predicted, float(ratios.steps_S[index]), stands_for)
        seconds /= self._speed
        self._regress(features_F, seconds)
        for sums, added in ((ratios.seconds_S, seconds), (ratios.features_SF, features_F), (ratios.steps_S, 1.0)):
            own = RATIO_KEPT * sums[index] + added
            sums *= OTHERS_KEPT**stands_for
            sums[index] = own

    def _weighted(self, ratios: _Ratios) -> Floats:
        """Each strategy's steps times its ratio [S], which is not believed to be just anything."""
        ratio_S = ratios.seconds_S / (ratios.features_SF @ self._weights_F + 1e-12)
        return ratios.steps_S * np.minimum(ratio_S, LARGEST_RATIO)

    def _ratio(self, ratios: _Ratios, index: int) -> float:
        alike_S = self._alike_SS[index]
        weighted_S = self._weighted(ratios)
        return float((alike_S @ weighted_S + RATIO_PRIOR) / (alike_S @ ratios.steps_S + RATIO_PRIOR))

    def _follow_speed(self, ratio: float, steps: float, stands_for: int) -> None:
        # a strategy that was hardly measured says more of itself than of the machine
        change = stands_for * SPEED_LEARNED * steps / (steps + 8) * min(max(math.log(ratio), -0.5), 0.5)
        self._speed = min(max(self._speed * math.exp(change), SPEEDS[0]), SPEEDS[1])

    def _fit_first(self, features_F: Floats, seconds: float) -> None:
        """No ratios yet: the first steps of all compile and allocate."""
        self._first.append((features_F, seconds))
        scales = sorted(took / float(each_F @ PRIOR_F) for each_F, took in self._first)
        scale = scales[(len(scales) - 1) // 2]
        self._weights_F, self._information_FF = scale * PRIOR_F, _prior_information(scale)
        for each_F, took in self._first:
            self._regress(each_F, min(took, FIRST_OUTLIER * scale * float(each_F @ PRIOR_F)))

    def _regress(self, features_F: Floats, seconds: float) -> None:
        """Recursive least squares of the relative error, so that large batches don't rule the fit. Only what this step
        informs of is forgotten (directional forgetting), so that what no step excites stays as it was learned."""
        scaled_F = features_F / (NOISE * seconds)
        error = 1 / NOISE - float(scaled_F @ self._weights_F)
        informed_F = self._information_FF @ scaled_F
        forgotten = (1 - FORGETTING) / float(scaled_F @ informed_F)
        self._information_FF += np.outer(scaled_F, scaled_F) - forgotten * np.outer(informed_F, informed_F)
        # scaled to a unit diagonal: the weights differ by orders of magnitude
        units_F = 1 / np.sqrt(np.diagonal(self._information_FF))
        scaled_FF = self._information_FF * np.outer(units_F, units_F) + RIDGE
        gain_F = units_F * np.linalg.solve(scaled_FF, units_F * scaled_F)
        fitted_F = self._weights_F + gain_F * error
        # nothing takes less than no time; what that adds to this step is taken off again, or corrections of one sign
        # are kept and those of the other are not, and the weights grow without bound
        weights_F = np.maximum(fitted_F, 0.0)
        wanted, got = float(features_F @ fitted_F), float(features_F @ weights_F)
        if got > 0:
            self._weights_F = weights_F * ((wanted if wanted > 0 else seconds) / got)
        else:
            self._weights_F = _scaled_prior(features_F, seconds)

    def _ratios(self, bucket: int) -> _Ratios:
        ratios = self._buckets.get(bucket)
        if ratios is None:
            ratios = self._buckets[bucket] = _Ratios(len(self._table_SF))
        return ratios


def _parts(strategy: Strategy, verified: float) -> tuple[float, ...]:
    """Features for one row without context; the last is none of a row's."""
    passes = strategy.depth if strategy.drafter == "eagle" else 0
    drafted = 1 + strategy.top_k * (passes - 1) if passes else 0
    tree, ngram = float(strategy.is_tree), float(strategy.drafter == "ngram")
    return (1.0, 1.0, verified, verified, passes, drafted, tree, tree, ngram, 0.0)


def _alike(strategies: tuple[Strategy, ...]) -> Floats:
    """How much a step with one strategy says of another's ratio [S, S]: much if they verify about as many tokens with
    the same drafter."""
    widths_S = np.log2([1.0 + each.verify for each in strategies])
    drafters_S = np.array([each.drafter + "x" * each.is_tree for each in strategies])
    alike_SS = np.where(drafters_S[:, None] == drafters_S, *ALIKE) * np.exp(-2 * np.abs(widths_S[:, None] - widths_S))
    np.fill_diagonal(alike_SS, 1.0)
    return alike_SS


def _scales(batch: int, context: int) -> Floats:
    return np.array((1.0, batch, batch, batch * context / 256, 1.0, batch, 1.0, batch, batch, 1.0))


def _scaled_prior(features_F: Floats, seconds: float) -> Floats:
    return PRIOR_F * seconds / float(features_F @ PRIOR_F)


def _prior_information(scale: float) -> Floats:
    return np.diag(1.0 / (scale * PRIOR_F) ** 2)
