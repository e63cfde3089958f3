"""What each strategy did, by size of the batch, and why a step didn't speculate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tlt_pipeline.engine.strategies import StepFacts, Strategy

Reason = Literal["switched_off", "no_drafter", "not_chosen"]
"""Why a step didn't speculate: the config says so; it was asked for and there is no drafter yet; it was not chosen."""


@dataclass
class Use:
    """`accepted`: by draft position, how many rows had it accepted."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list[int])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(self.accepted) / max(self.rows, 1)


class StrategyAccount:
    """`uses`: by strategy and batch size, rounded up to a power of two."""

    def __init__(self) -> None:
        self.uses: dict[tuple[str, int], Use] = {}
        self.switches = 0
        self.not_speculated: Counter[Reason] = Counter()
        self._last: Strategy | None = None

    def add(self, facts: StepFacts, reason: Reason | None) -> None:
        """`reason` where the step didn't speculate."""
        if reason is not None:
            self.not_speculated[reason] += 1
        self.switches += self._last is not None and self._last != facts.strategy
        self._last = facts.strategy
        use = self.uses.setdefault((str(facts.strategy), 1 << (facts.batch - 1).bit_length()), Use())
        use.steps += 1
        use.rows += facts.batch
        use.tokens += facts.committed
        use.seconds += facts.seconds
        use.accepted.extend([0] * (len(facts.accepted) - len(use.accepted)))
        for position, count in enumerate(facts.accepted):
            use.accepted[position] += count
