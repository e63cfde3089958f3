"""Strategy policies on a simulated machine: near the best strategy at every batch size, and back when things change."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from tlt_pipeline.config import SpeculationConfig
from tlt_pipeline.engine.choice import make_policy
from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, StrategyPolicy, chain, strategies_of


class Machine:
    """Passes that cost a fixed time, a time a row and one a draft step, with noise and rare interruptions; proposals
    that are right with one chance."""

    def __init__(self, right: float, per_row: float = 0.15, per_draft: float = 0.4, seed: int = 0) -> None:
        self.right, self.per_row, self.per_draft = right, per_row, per_draft
        self.random = Random(seed)

    def time(self, batch: int, depth: int) -> float:
        return (3.0 + self.per_row * batch * (depth + 1) + self.per_draft * depth) * 1e-3

    def rate(self, batch: int, depth: int) -> float:
        """Expected tokens a second."""
        return batch * sum(self.right**k for k in range(depth + 1)) / self.time(batch, depth)

    def step(self, policy: StrategyPolicy, batch: int) -> float:
        """One decode step -> expected tokens a second of the strategy that was chosen, relative to the best one's."""
        strategy = policy.choose(state_of(batch))
        alive, accepted = batch, []
        for _ in range(strategy.depth):
            alive = sum(self.random.random() < self.right for _ in range(alive))
            accepted.append(alive)
        noise = 1.0 + 0.1 * self.random.random() + (5.0 if self.random.random() < 0.01 else 0.0)
        seconds = self.time(batch, strategy.depth) * noise
        policy.measured(
            StepFacts(strategy, batch, 128, batch + sum(accepted), seconds, 1 + strategy.verify, tuple(accepted))
        )
        best = max(self.rate(batch, depth) for depth in range(DEPTH + 1))
        return self.rate(batch, strategy.depth) / best


DEPTH = 6
CHAINS = (OFF, *(chain("eagle", depth) for depth in range(1, DEPTH + 1)))


def state_of(batch: int, remaining: int = 1000) -> BatchState:
    return BatchState(batch, 128, np.full(batch, remaining), CHAINS)


BATCHES = (1, 2, 4, 8, 16, 32)


def policy_of(choice: str) -> StrategyPolicy:
    return make_policy(SpeculationConfig(depth=DEPTH, choice=choice, max_batch=64))  # type: ignore[arg-type]


def run(policy: StrategyPolicy, machine: Machine, steps: int, batch: Callable[[int], int]) -> float:
    """Mean share of the best strategy's tokens a second."""
    return sum(machine.step(policy, batch(step)) for step in range(steps)) / steps


@pytest.mark.parametrize("right", [0.05, 0.5, 0.9])
@pytest.mark.parametrize(("choice", "share"), [("goodput", 0.9), ("beg_mab", 0.75)])
def test_close_to_the_best_strategy_at_every_batch_size(choice: str, share: float, right: float) -> None:
    policy, machine = policy_of(choice), Machine(right)
    for batch in BATCHES:
        run(policy, machine, 120, lambda _, batch=batch: batch)
    for batch in BATCHES:
        assert run(policy, machine, 200, lambda _, batch=batch: batch) > share, batch


def test_goodput_needs_no_trial_at_a_batch_size_it_never_saw() -> None:
    policy, machine = policy_of("goodput"), Machine(0.85)
    run(policy, machine, 150, lambda step: (2, 24)[step // 5 % 2])
    assert run(policy, machine, 20, lambda _: 8) > 0.9


def test_goodput_does_not_collapse_where_the_batch_swings_around_a_threshold() -> None:
    policy, machine = policy_of("goodput"), Machine(0.6)
    run(policy, machine, 200, lambda step: 1 + step % 32)
    assert run(policy, machine, 300, lambda step: 9 + step % 5) > 0.95


@pytest.mark.parametrize("choice", ["goodput", "beg_mab"])
def test_a_better_and_a_worse_drafter_are_noticed(choice: str) -> None:
    policy = policy_of(choice)
    run(policy, Machine(0.05), 300, lambda _: 2)
    policy.new_drafter()
    run(policy, Machine(0.9, seed=1), 150, lambda _: 2)
    assert run(policy, Machine(0.9, seed=2), 100, lambda _: 2) > 0.85
    policy.new_drafter()
    run(policy, Machine(0.05, seed=3), 150, lambda _: 2)
    assert run(policy, Machine(0.05, seed=4), 100, lambda _: 2) > 0.85


@pytest.mark.parametrize("choice", ["goodput", "beg_mab", "fixed"])
def test_never_above_the_limit_and_no_deeper_than_configured(choice: str) -> None:
    policy = policy_of(choice)
    assert all(policy.choose(state_of(65)) == OFF for _ in range(50))
    assert {policy.choose(state_of(3)).depth for _ in range(200)} <= set(range(DEPTH + 1))


def test_strategies_of_a_config() -> None:
    config = SpeculationConfig(depth=2, ngram_depths=(3,), trees=("3x2x5",))
    assert [str(each) for each in strategies_of(config)] == ["off", "ngram-3", "eagle-1", "eagle-2", "eagle-3x2x5"]
    assert strategies_of(SpeculationConfig(drafter="off")) == (OFF,)


def test_a_seed_repeats_the_choices() -> None:
    def choices() -> list[str]:
        policy, machine = policy_of("beg_mab"), Machine(0.5)
        found = []
        for _ in range(200):
            machine.step(policy, 4)
            found.append(str(policy.choose(state_of(4))))
        return found

    assert choices() == choices()
