"""What the scheduler's core hears and says.

Events are the messages of worker.events, hidden_states, weights and dead_letters as they are, plus the
three below. Commands say what the service must do; they hold no more than that needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tlt_pipeline.messages import (
    Claim,
    Completion,
    DeadLetter,
    DrafterUse,
    HiddenShard,
    Holder,
    Purpose,
    RunFailed,
    StepTrained,
    WeightsPublished,
    WorkerHeartbeat,
    WorkerIdle,
    WorkerStarted,
    WorkerYielded,
)
from tlt_pipeline.scheduling.records import StepRecord
from tlt_pipeline.scheduling.state import Answer

# --- events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """Time has passed: deadlines and timeouts are looked at."""


@dataclass(frozen=True)
class Restarted:
    """The scheduler is up again, with a saved state. The time it was away counts against nobody."""


@dataclass(frozen=True)
class CompletionSeen:
    """What decisions need of a Completion."""

    request_id: str
    policy_version: int
    reward: float
    tokens: int
    drafts: int = 0
    accepted: int = 0
    verified: bool = True
    claim: Claim = "exact"
    drafters: tuple[DrafterUse, ...] = ()

    @classmethod
    def of(cls, completion: Completion) -> CompletionSeen:
        return cls(
            request_id=completion.request_id,
            policy_version=completion.policy_version,
            reward=completion.reward,
            tokens=completion.tokens.length,
            drafts=completion.draft.drafts,
            accepted=completion.draft.accepted,
            verified=completion.reward_error is None,
            claim=completion.claim,
            drafters=completion.draft.drafters,
        )

    @property
    def answer(self) -> Answer:
        return Answer(self.reward, self.tokens, self.drafts, self.accepted, self.verified)


Event = (
    Tick
    | Restarted
    | CompletionSeen
    | WorkerStarted
    | WorkerHeartbeat
    | WorkerIdle
    | WorkerYielded
    | StepTrained
    | RunFailed
    | HiddenShard
    | WeightsPublished
    | DeadLetter
)

# --- commands -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SubmitStep:
    """Make the requests of this step, or of the evaluation of policy version `step`, and queue them."""

    step: int
    policy_version: int
    purpose: Purpose
    prompts: int
    group_size: int


@dataclass(frozen=True)
class GrantLease:
    slot: int
    holder: Holder
    lease: int


@dataclass(frozen=True)
class AssignShards:
    """`bodies`: encoded HiddenShard messages."""

    slot: int
    lease: int
    bodies: tuple[bytes, ...]


@dataclass(frozen=True)
class RecallLease:
    slot: int
    lease: int
    deadline_s: float


@dataclass(frozen=True)
class RollBack:
    """Have this slot's trainer publish the weights of drafter version `to` again: `version` drafts worse."""

    slot: int
    version: int
    to: int


@dataclass(frozen=True)
class SendTrainStep:
    step: int
    policy_version: int
    request_ids: tuple[str, ...]
    dead: int


@dataclass(frozen=True)
class DropShards:
    """Delete these blobs."""

    blobs: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RecordStep:
    """A step is done: a line for metrics.jsonl."""

    record: StepRecord


@dataclass(frozen=True)
class Note:
    """Worth a line in the log."""

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    warning: bool = True


@dataclass(frozen=True)
class SendShutdown:
    reason: str


@dataclass(frozen=True)
class Finish:
    """All steps are done: write the summary and end."""


@dataclass(frozen=True)
class Fail:
    """End with this exit code (tlt_pipeline.failures)."""

    reason: str
    code: int


Command = (
    SubmitStep
    | GrantLease
    | AssignShards
    | RecallLease
    | RollBack
    | SendTrainStep
    | DropShards
    | RecordStep
    | Note
    | SendShutdown
    | Finish
    | Fail
)
