"""A simulated machine with drafters, for the strategy policies: what a step costs, what gets accepted, what is best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, Strategy, StrategyPolicy, parse_strategy

STRATEGIES = (
    OFF,
    *(parse_strategy(f"ngram-{depth}") for depth in (2, 4, 8)),
    *(parse_strategy(f"eagle-{depth}") for depth in range(1, 9)),
    *(parse_strategy(f"eagle-{tree}") for tree in ("3x3x8", "4x4x12", "5x4x16", "6x4x24")),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class World:
    """Seconds are in units of a millisecond. `right`: chance that a chain's proposal is accepted; `caught`: share of
    its misses that a tree of enough nodes catches; `matches`: chance that a row has an n-gram match; `copied`: that a
    token of one is accepted. Verified tokens are free up to `free_rows`, then cost `per_token`; `catch_up`: what it
    costs to turn the drafter on after a step without it, for each row and step missed; `slowed`: by how much others
    slow the machine down, half of the time."""

    right: float = 0.7
    caught: float = 0.4
    matches: float = 0.2
    copied: float = 0.5
    base: float = 2.5
    per_row: float = 0.03
    per_token: float = 0.03
    per_context: float = 0.01
    free_rows: int = 16
    per_pass: float = 0.3
    per_drafted: float = 0.004
    per_tree: float = 0.4
    per_tree_row: float = 0.03
    per_lookup: float = 0.01
    catch_up: float = 0.004
    interrupted: float = 0.01
    noise: float = 0.1
    slowed: float = 1.0
    seed: int = 0
    missed: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def seconds(self, strategy: Strategy, batch: int, context: int, verified: int) -> float:
        rows = batch * verified
        took = self.base + self.per_row * batch + self.per_token * max(rows - self.free_rows, 0)
        took += self.per_context * rows * context / 256
        if strategy.drafter == "eagle":
            drafted = 1 + strategy.top_k * (strategy.depth - 1)
            took += self.per_pass * strategy.depth + self.per_drafted * batch * drafted
        if strategy.is_tree:
            took += self.per_tree + self.per_tree_row * batch
        if strategy.drafter == "ngram":
            took += self.per_lookup * batch
        return took * 1e-3

    def rates(self, strategy: Strategy) -> list[float]:
        """The chance that each position is accepted if those before it were."""
        if strategy.drafter == "ngram":
            return [self.matches * self.copied, *[self.copied] * (strategy.depth - 1)]
        rates = []
        for position in range(strategy.depth):
            right = self.right * 0.98**position
            caught = self.caught * min((strategy.verify / strategy.depth - 1) / 2, 1.0) if strategy.is_tree else 0.0
            rates.append(right + caught * (1 - right))
        return rates

    def expected_tokens(self, strategy: Strategy, remaining_B: NDArray[np.int64]) -> float:
        alive_J = np.cumprod([1.0, *self.rates(strategy)])
        return float(((remaining_B[:, None] > np.arange(len(alive_J))) * alive_J).sum())

    def rate(self, strategy: Strategy, state: BatchState) -> float:
        """Expected tokens a second."""
        batch, verified = state.batch, 1 + strategy.verify
        seconds = self.seconds(strategy, batch, state.context, verified)
        if strategy.drafter == "ngram":
            none = (1 - self.matches) ** batch
            seconds += none * (self.seconds(strategy, batch, state.context, 1) - seconds)
        return self.expected_tokens(strategy, state.remaining_B) / seconds

    def best(self, state: BatchState) -> Strategy:
        return max(state.available, key=lambda each: self.rate(each, state))

    def step(self, strategy: Strategy, state: BatchState) -> tuple[StepFacts, float]:
        """One decode step -> what a policy is told of it, and the seconds it would have taken without noise."""
        matched = int(self.random.binomial(state.batch, self.matches))
        verified = 1 if strategy.drafter == "ngram" and not matched else 1 + strategy.verify
        alive, accepted = matched if strategy.drafter == "ngram" else state.batch, []
        for position, rate in enumerate(self.rates(strategy)):
            if strategy.drafter == "ngram" and position == 0:
                rate = self.copied
            alive = int(self.random.binomial(alive, rate))
            accepted.append(alive)
        seconds = self.seconds(strategy, state.batch, state.context, verified)
        behind = self.missed if strategy.drafter == "eagle" else 0
        self.missed = 0 if strategy.drafter == "eagle" else min(self.missed + 1, 128)
        seconds += self.catch_up * 1e-3 * state.batch * behind
        noise = 1.0 + self.noise * self.random.random() + (5.0 if self.random.random() < self.interrupted else 0.0)
        self.steps += 1
        noise *= self.slowed if self.steps // 120 % 2 else 1.0
        committed = state.batch + sum(accepted)
        facts = StepFacts(
            strategy,
            state.batch,
            state.context,
            committed,
            seconds * noise,
            verified,
            tuple(accepted),
            counts=behind <= strategy.depth + 1,
        )
        return facts, seconds


@cache
def remaining(batch: int, tokens: int) -> NDArray[np.int64]:
    return np.full(batch, tokens)


@cache
def state_of(
    batch: int, context: int = 128, tokens: int = 1000, available: tuple[Strategy, ...] = STRATEGIES
) -> BatchState:
    return BatchState(batch, context, remaining(batch, tokens), available)


@dataclass
class Outcome:
    """`share`: of the tokens a second that the best strategy of each step would have brought; `of_off`: the tokens a
    second relative to never speculating; `chosen`: what ran."""

    share: float
    of_off: float
    chosen: list[Strategy]

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in zip(self.chosen, self.chosen[1:], strict=False))


def tail(steps: int, batch: int = 64) -> list[BatchState]:
    """A batch of long-tailed answers until the last one is done: most end early, a few run on."""
    sizes = [max(1, round(batch * (1 - step / steps) ** 3)) for step in range(steps)]
    return [
        state_of(size, 128 + 64 * (step // 256), 1000 if step < steps - 50 else steps - step)
        for step, size in enumerate(sizes)
    ]


def run(policy: StrategyPolicy, world: World, states: list[BatchState]) -> Outcome:
    """Expected tokens of what was chosen in each step and the time that the best strategy, and `off`, would have taken
    for as many, against the time taken."""
    chosen: list[Strategy] = []
    took = best = off = 0.0
    rates: dict[int, tuple[float, float]] = {}
    for state in states:
        strategy = policy.choose(state)
        assert strategy in state.available
        facts, seconds = world.step(strategy, state)
        policy.measured(facts)
        if id(state) not in rates:
            rates[id(state)] = world.rate(world.best(state), state), world.rate(OFF, state)
        tokens = world.expected_tokens(strategy, state.remaining_B)
        took += seconds if strategy.drafter != "ngram" else tokens / world.rate(strategy, state)
        best += tokens / rates[id(state)][0]
        off += tokens / rates[id(state)][1]
        chosen.append(strategy)
    return Outcome(best / took, off / took, chosen)
