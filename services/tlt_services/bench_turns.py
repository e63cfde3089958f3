"""Turns of `tlt bench engine`: one strategy, one batch size, the same requests from their beginning.

The batch is full throughout: an answer that ends makes room for the next request. The time is that of decoding alone:
the engine times a step after it has read new prompts, and the first step, in which all of them are new, isn't counted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.strategies import BatchState, StepFacts, Strategy, StrategyPolicy
from tlt_pipeline.messages import RolloutRequest
from tlt_services.bench_inputs import endless_requests


@dataclass
class Turn:
    """`steps` by strategy; `accepted`: proposals, over all rows; `cpu_share`: seconds of processor time in a second."""

    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0
    accepted: int = 0
    cpu_share: float = 1.0
    steps: Counter[str] = field(default_factory=Counter[str])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / max(self.steps.total(), 1)

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.accepted / max(self.rows, 1)


class Recorder:
    """A strategy policy that also adds up what its steps brought, its own time included."""

    def __init__(self, policy: StrategyPolicy) -> None:
        self._policy = policy
        self.turn = Turn()

    def choose(self, state: BatchState) -> Strategy:
        return self._policy.choose(state)

    def measured(self, facts: StepFacts) -> None:
        began = time.perf_counter()
        self._policy.measured(facts)
        turn = self.turn
        turn.seconds += facts.seconds + time.perf_counter() - began
        turn.tokens += facts.committed
        turn.rows += facts.batch
        turn.accepted += sum(facts.accepted)
        turn.steps[str(facts.strategy)] += 1

    def new_drafter(self) -> None:
        self._policy.new_drafter()


def decode_turn(
    engine: Engine,
    policy: StrategyPolicy,
    requests: Sequence[RolloutRequest],
    batch: int,
    tokens: int,
    answers: dict[str, list[int]],
) -> Turn:
    """Decodes `requests` from the first on, over and over with new seeds, `batch` at a time, until `tokens` are
    counted. What was written goes to `answers`, by request."""
    engine.abandon()
    recorder = Recorder(policy)
    engine.choice = recorder
    pending = endless_requests(requests)
    is_first = True
    began, used = time.perf_counter(), time.process_time()
    while is_first or recorder.turn.tokens < tokens:
        while engine.running + len(engine.waiting) < batch:
            engine.submit(next(pending))
        for done in engine.step():
            answers[done.request.request_id] = done.tokens
        if is_first:
            recorder.turn, is_first = Turn(), False
    recorder.turn.cpu_share = (time.process_time() - used) / (time.perf_counter() - began)
    answers.update(engine.abandon())
    return recorder.turn


@dataclass(frozen=True)
class Shrinking:
    """A batch decoded to the end. `seconds`: from when nothing waited any more; `full`: answers running then (none
    where the last one ended in the step that read its prompt)."""

    seconds: float
    full: int
    answers: dict[str, list[int]]


def decode_tail(engine: Engine, policy: StrategyPolicy, requests: Sequence[RolloutRequest], most: int) -> Shrinking:
    """At most `most` at a time; the time in which the batch shrinks from full to none."""
    engine.abandon()
    engine.choice = policy
    pending = deque(requests)
    answers: dict[str, list[int]] = {}
    began, full = time.perf_counter(), 0
    while pending or engine.running or engine.waiting:
        while pending and engine.running + len(engine.waiting) < most:
            engine.submit(pending.popleft())
        if not full and not pending and not engine.waiting:
            began, full = time.perf_counter(), engine.running
        for done in engine.step():
            answers[done.request.request_id] = done.tokens
    return Shrinking(time.perf_counter() - began if full else 0.0, full, answers)
