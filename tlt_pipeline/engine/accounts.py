"""What each strategy did, by size of the batch, and why a step didn't speculate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tlt_pipeline.config import SpeculationConfig
from tlt_pipeline.engine.strategies import StepFacts, Strategy, batch_bucket

Reason = Literal["switched_off", "no_drafter", "not_chosen", "above_max_batch", "no_match"]
"""Why a step didn't speculate: the config says so; it was asked for and there is no drafter yet; it was not chosen;
more answers were running than it is for; no n-gram matched."""


def hindrance(config: SpeculationConfig, facts: StepFacts, has_drafter: bool) -> Reason | None:
    """Why a step didn't speculate with the drafter that the config asks for; None: it did."""
    if config.drafter == "off":
        return "switched_off"
    if config.drafter == "eagle" and not has_drafter:
        return "no_drafter"
    if facts.drafts:
        return None
    if facts.strategy.drafter == "ngram":
        return "no_match"
    return "above_max_batch" if facts.batch > config.max_batch else "not_chosen"


@dataclass
class Use:
    """`drafts`: rows that had a proposal; `draft_tokens`: what was proposed to them; `accepted`: by draft position, how
    many rows had it accepted."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list[int])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def acceptance_length(self) -> float:
        """Of all rows, also where no n-gram matched."""
        return 1.0 + sum(self.accepted) / max(self.rows, 1)

    @property
    def acceptance(self) -> list[float]:
        """Share of the rows that had each position accepted."""
        return [count / max(self.rows, 1) for count in self.accepted]

    def add(self, facts: StepFacts) -> None:
        self.steps += 1
        self.rows += facts.batch
        self.tokens += facts.committed
        self.seconds += facts.seconds
        drafts = facts.batch if facts.drafts is None else facts.drafts
        self.drafts += drafts if facts.verified > 1 else 0
        self.draft_tokens += drafts * (facts.verified - 1)
        self.accepted.extend([0] * (len(facts.accepted) - len(self.accepted)))
        for position, count in enumerate(facts.accepted):
            self.accepted[position] += count


class StrategyAccount:
    """`uses`: by strategy and batch bucket; `stand_ins`: steps in which n-grams stood in for a drafter that isn't
    there yet."""

    def __init__(self) -> None:
        self.uses: dict[tuple[str, int], Use] = {}
        self.switches = 0
        self.stand_ins = 0
        self.not_speculated: Counter[Reason] = Counter()
        self._last: Strategy | None = None

    def add(self, facts: StepFacts, reason: Reason | None) -> None:
        """`reason`: why the step didn't speculate with the drafter that the config asks for."""
        if facts.strategy.drafter == "ngram":
            self.stand_ins += reason == "no_drafter"
            reason = "no_match" if facts.verified == 1 else None
        if reason is not None:
            self.not_speculated[reason] += 1
        self.switches += self._last is not None and self._last != facts.strategy
        self._last = facts.strategy
        self.uses.setdefault((str(facts.strategy), batch_bucket(facts.batch)), Use()).add(facts)

    def share_of_time(self, strategy: str, bucket: int) -> float:
        """Of all decode steps' seconds."""
        return self.uses[strategy, bucket].seconds / max(sum(use.seconds for use in self.uses.values()), 1e-9)
