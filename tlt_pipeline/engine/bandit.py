"""BEG-MAB: the TLT paper's bucketed ε-greedy bandit (arXiv 2511.16665, section 5).

Running answers fall into buckets by their number; each bucket has all strategies, `off` among them, as its arms. An
arm's worth is the median of its last rewards, tokens committed a second; arms that were never tried come first, those
first that verify about as many tokens as usually pay at this size.
"""

from __future__ import annotations

from collections import deque
from random import Random
from statistics import median

from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, Strategy, batch_bucket

WINDOW = 24
"""Rewards an arm remembers."""
UNCOUNTED = 3
"""So many steps may pass uncounted (a drafter catches up) before their reward is taken for want of a better one."""
LIKED_ROWS, LIKED_TOKENS = 32, 5
"""Rows of a verify pass that cost little more than one, and tokens a row that pay in small batches."""
CAUTION = 3
"""Power of an arm's worth that its chance of being tried again is proportional to: the paper's is 0, with few arms."""
KEPT = 2
"""Rewards that outlive a change of drafter."""


class Arm:
    """`worth`: the median of the last rewards."""

    def __init__(self) -> None:
        self.rewards: deque[float] = deque(maxlen=WINDOW)
        self.worth = 0.0
        self.uncounted = 0

    def add(self, reward: float) -> None:
        self.rewards.append(reward)
        self.worth = median(self.rewards)

    def restart(self) -> None:
        while len(self.rewards) > KEPT:
            self.rewards.popleft()


class Bandit:
    def __init__(self, strategies: tuple[Strategy, ...], max_batch: int, epsilon: float, seed: int) -> None:
        """`max_batch`: with more running answers it never speculates."""
        self.strategies, self.max_batch, self.epsilon = strategies, max_batch, epsilon
        self._random = Random(seed)
        self._buckets: dict[int, dict[Strategy, Arm]] = {}

    def choose(self, state: BatchState) -> Strategy:
        if state.batch > self.max_batch:
            return OFF if OFF in state.available else state.available[0]
        bucket = batch_bucket(state.batch)
        every = self._arms(bucket)
        arms = [(every[strategy], strategy) for strategy in state.available if strategy in every]
        untried = [strategy for arm, strategy in arms if not arm.rewards]
        if untried:
            return min(untried, key=lambda strategy: _distance(strategy, bucket))
        if not arms:
            return state.available[0]
        best, strategy = max(arms, key=_worth)
        if best.worth > 0 and self._random.random() < self.epsilon:
            return self._random.choices(arms, [(arm.worth / best.worth) ** CAUTION for arm, _ in arms])[0][1]
        return strategy

    def measured(self, facts: StepFacts) -> None:
        arm = self._arms(batch_bucket(facts.batch)).get(facts.strategy)
        if arm is None or facts.batch > self.max_batch:
            return
        arm.uncounted += not facts.counts
        if facts.counts or (not arm.rewards and arm.uncounted >= UNCOUNTED):
            arm.add(facts.committed / max(facts.seconds, 1e-9))

    def new_drafter(self) -> None:
        """The newest rewards stay, as a start."""
        for arms in self._buckets.values():
            for strategy, arm in arms.items():
                if strategy.drafter == "eagle":
                    arm.restart()

    def _arms(self, bucket: int) -> dict[Strategy, Arm]:
        if bucket not in self._buckets:
            self._buckets[bucket] = {strategy: Arm() for strategy in self.strategies}
        return self._buckets[bucket]


def _worth(arm: tuple[Arm, Strategy]) -> float:
    return arm[0].worth


def _distance(strategy: Strategy, bucket: int) -> float:
    """`off` first: all else is held against it."""
    liked = min(max(LIKED_ROWS / bucket, 1.0), LIKED_TOKENS)
    return -1.0 if strategy == OFF else abs(1 + strategy.verify - liked)
