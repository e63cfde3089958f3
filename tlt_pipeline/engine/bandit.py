"""BEG-MAB: the TLT paper's bucketed ε-greedy bandit (arXiv 2511.16665, section 5).

Running answers fall into buckets by their number; each bucket has all strategies, `off` among them, as its arms. An
arm's worth is the median of its last rewards, tokens committed a second; arms that were never tried come first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from statistics import median

from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, Strategy

WINDOW = 24
"""Rewards an arm remembers."""


@dataclass
class Arm:
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def worth(self) -> float:
        return median(self.rewards)


class Bandit:
    def __init__(self, strategies: tuple[Strategy, ...], max_batch: int, epsilon: float, seed: int) -> None:
        """`max_batch`: with more running answers it never speculates."""
        self.strategies, self.max_batch, self.epsilon = strategies, max_batch, epsilon
        self._random = Random(seed)
        self._buckets: dict[int, dict[Strategy, Arm]] = {}

    def choose(self, state: BatchState) -> Strategy:
        if state.batch > self.max_batch:
            return OFF
        every = self._arms(state.batch)
        arms = {strategy: every[strategy] for strategy in state.available}
        untried = [strategy for strategy, arm in arms.items() if not arm.rewards]
        if untried:
            return untried[-1]
        if self._random.random() < self.epsilon:
            return self._random.choice(state.available)
        return max(arms, key=lambda strategy: arms[strategy].worth)

    def measured(self, facts: StepFacts) -> None:
        if facts.batch <= self.max_batch and facts.counts:
            self._arms(facts.batch)[facts.strategy].rewards.append(facts.committed / max(facts.seconds, 1e-9))

    def new_drafter(self) -> None:
        """The newest rewards stay, as a start."""
        for arms in self._buckets.values():
            for strategy, arm in arms.items():
                while strategy != OFF and len(arm.rewards) > 2:
                    arm.rewards.popleft()

    def _arms(self, batch: int) -> dict[Strategy, Arm]:
        return self._buckets.setdefault(batch.bit_length(), {strategy: Arm() for strategy in self.strategies})
