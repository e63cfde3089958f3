"""What a decode step may do (a strategy), what it brought, and the interface of what chooses.

A choice can't change tokens (design 5.1), only how fast they come. Depth: tokens proposed a pass; batch: running
answers; context: the longest answer with its prompt, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tlt_pipeline.config import SpeculationConfig


@dataclass(frozen=True)
class Strategy:
    drafter: Literal["off", "eagle"]
    depth: int = 0

    def __str__(self) -> str:
        return self.drafter if self.drafter == "off" else f"{self.drafter}-{self.depth}"


OFF = Strategy("off")


@dataclass(frozen=True)
class StepFacts:
    """One decode step. `accepted`: for each draft position, how many rows had it accepted (and all before it).
    `counts`: false where the step's time says nothing of its strategy: a drafter's cache was caught up in it."""

    strategy: Strategy
    batch: int
    context: int
    committed: int
    seconds: float
    accepted: tuple[int, ...] = ()
    counts: bool = True


class StrategyPolicy(Protocol):
    """Chooses the strategy of each step from what the steps before brought."""

    def choose(self, batch: int, context: int, room: int) -> Strategy:
        """`room`: tokens that the answer with the most left may still get; proposing more is in vain."""
        ...

    def measured(self, facts: StepFacts) -> None: ...

    def new_drafter(self) -> None:
        """Another drafter version: what speculation brought so far says less."""
        ...


class Fixed:
    """Always the deepest strategy, up to `max_batch` running answers."""

    def __init__(self, strategies: tuple[Strategy, ...], max_batch: int) -> None:
        self._strategy, self._max_batch = strategies[-1], max_batch

    def choose(self, batch: int, context: int, room: int) -> Strategy:
        return self._strategy if batch <= self._max_batch else OFF

    def measured(self, facts: StepFacts) -> None:
        pass

    def new_drafter(self) -> None:
        pass


def strategies_of(config: SpeculationConfig) -> tuple[Strategy, ...]:
    """`off` first, then chains from shallow to `depth`."""
    if config.drafter == "off":
        return (OFF,)
    return (OFF, *(Strategy(config.drafter, depth) for depth in range(1, config.depth + 1)))
