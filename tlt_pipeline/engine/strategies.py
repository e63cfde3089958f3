"""What a decode step may do (a strategy), what it brought, and the interface of what chooses.

A choice can't change tokens (design 5.1), only how fast they come. A strategy is (drafter, depth, top-k, verify
tokens): a chain has one proposal a level, a tree the best `verify` nodes of levels that branch `top_k` ways (EAGLE-2,
arXiv 2406.16858). Written `off`, `ngram-4`, `eagle-6` (chains of that depth), `eagle-4x3x8` (depth x top-k x verify).
Shapes: B = running answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_pipeline.config import SpeculationConfig

DrafterKind = Literal["off", "ngram", "eagle"]
_WRITTEN = re.compile(r"(?P<drafter>ngram|eagle)-(?P<depth>\d+)(x(?P<top_k>\d+)x(?P<verify>\d+))?")


@dataclass(frozen=True)
class Strategy:
    """`depth`: levels of proposals; `verify`: proposed tokens a row that one pass verifies (a chain: its depth)."""

    drafter: DrafterKind
    depth: int = 0
    top_k: int = 1
    verify: int = 0

    @property
    def is_tree(self) -> bool:
        return self.top_k > 1

    @property
    def slots(self) -> int:
        """Places in a cache that it needs behind what is committed: for what is verified, or for what is drafted."""
        return max(self.verify, (self.depth - 1) * self.top_k, 0) + 1

    def __str__(self) -> str:
        if self.drafter == "off":
            return "off"
        return f"{self.drafter}-{self.depth}" + (f"x{self.top_k}x{self.verify}" if self.is_tree else "")


OFF = Strategy("off")


def chain(drafter: DrafterKind, depth: int) -> Strategy:
    return Strategy(drafter, depth, 1, depth)


def parse_strategy(text: str) -> Strategy:
    """The strategy written so (see above). Raises ValueError with what can be written."""
    if text == "off":
        return OFF
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is no strategy: write off, ngram-4, eagle-6, or eagle-4x3x8 (depth x top-k x verify)"
        )
    depth = int(found["depth"])
    if found["top_k"] is None:
        strategy = chain(found["drafter"], depth)  # type: ignore[arg-type] the expression lets no other word through
    else:
        strategy = Strategy(found["drafter"], depth, int(found["top_k"]), int(found["verify"]))  # type: ignore[arg-type]
    _check(text, strategy)
    return strategy


def _check(text: str, strategy: Strategy) -> None:
    if not 1 <= strategy.depth <= 16:
        raise ValueError(f"{text!r}: a depth is from 1 to 16")
    if strategy.top_k < 1 or (strategy.top_k == 1) != (strategy == chain(strategy.drafter, strategy.depth)):
        raise ValueError(f"{text!r}: a tree branches at least 2 ways")
    if strategy.is_tree and strategy.drafter != "eagle":
        raise ValueError(f"{text!r}: only the eagle drafter proposes trees")
    if strategy.verify < strategy.depth or strategy.verify > 64:
        raise ValueError(f"{text!r}: a tree verifies at least its depth and at most 64 tokens")


@dataclass(frozen=True)
class BatchState:
    """What a choice may depend on. `context`: the longest answer with its prompt, tokens; `remaining_B`: tokens that
    each answer may still get (proposing more is in vain); `available`: what may run in this step, `off` first."""

    batch: int
    context: int
    remaining_B: NDArray[np.int64]
    available: tuple[Strategy, ...]


@dataclass(frozen=True)
class StepFacts:
    """One decode step. `verified`: tokens a row that the pass read (1 + proposals; an n-gram step without a match has
    1); `accepted`: for each draft position, how many rows had it accepted (and all before it). `counts`: false where
    the step's time says nothing of its strategy: a drafter's cache was caught up in it; `drafts`: rows that had a
    proposal, None: all that had one to verify."""

    strategy: Strategy
    batch: int
    context: int
    committed: int
    seconds: float
    verified: int
    accepted: tuple[int, ...] = ()
    counts: bool = True
    drafts: int | None = None


class StrategyPolicy(Protocol):
    """Chooses the strategy of each step from what the steps before brought."""

    def choose(self, state: BatchState) -> Strategy:
        """One of `state.available`."""
        ...

    def measured(self, facts: StepFacts) -> None: ...

    def new_drafter(self) -> None:
        """Another version of the trained drafter: what it brought so far says less."""
        ...


class Fixed:
    """Always one strategy, up to `max_batch` running answers and wherever it is available."""

    def __init__(self, strategy: Strategy, max_batch: int = 1 << 30) -> None:
        self._strategy, self._max_batch = strategy, max_batch

    def choose(self, state: BatchState) -> Strategy:
        fits = state.batch <= self._max_batch and self._strategy in state.available
        return self._strategy if fits else OFF

    def measured(self, facts: StepFacts) -> None:
        pass

    def new_drafter(self) -> None:
        pass


def batch_bucket(batch: int) -> int:
    """Sizes that are treated alike: rounded up to a power of two."""
    return 1 << (batch - 1).bit_length()


def strategies_of(config: SpeculationConfig) -> tuple[Strategy, ...]:
    """All that this config allows: `off`, n-gram chains, eagle chains from shallow to `depth`, trees."""
    if config.drafter == "off":
        return (OFF,)
    ngrams = tuple(chain("ngram", depth) for depth in config.ngram_depths)
    if config.drafter == "ngram":
        return (OFF, *ngrams)
    chains = tuple(chain("eagle", depth) for depth in range(1, config.depth + 1))
    return (OFF, *ngrams, *chains, *(parse_strategy(f"eagle-{tree}") for tree in config.trees))
