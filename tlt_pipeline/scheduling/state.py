"""Everything the scheduler knows, as frozen values that survive as bytes.

Mappings are typed read-only and never changed in place. `to_bytes` and `from_bytes` are each other's
inverse; the bytes carry a format number, so that a scheduler of another version says so instead of
guessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import msgpack
from pydantic import TypeAdapter, ValidationError

from tlt_pipeline.config import RunConfig
from tlt_pipeline.messages import Holder, Purpose

FORMAT = 1


class StateInvalid(ValueError):
    """Saved bytes that this scheduler can't go on from; one line with the remedy."""


@dataclass(frozen=True)
class Settings:
    """What of the run's config decisions depend on."""

    steps: int
    prompts: int
    group_size: int
    slots: int
    max_staleness: int = 0
    colocated: bool = True
    train_drafter: bool = True
    deadline_s: float = 1.0
    worker_timeout_s: float = 15.0
    retry_s: float = 1.0
    """How long an idle worker rests before it looks again for requests that nobody seems to work on."""
    bytes_quota: int = 1 << 29
    keep_steps: int = 2
    eval_every: int = 0
    eval_prompts: int = 0

    @classmethod
    def of(cls, config: RunConfig, eval_prompts: int) -> Settings:
        """`eval_prompts`: how many held-out prompts the task really has."""
        return cls(
            steps=config.steps,
            prompts=config.rollout.prompts_per_step,
            group_size=config.rollout.group_size,
            slots=config.slots.count,
            max_staleness=config.max_staleness,
            colocated=config.learner.colocated,
            train_drafter=config.trains_drafter,
            deadline_s=config.slots.preempt_deadline_s,
            worker_timeout_s=config.limits.worker_timeout_s,
            retry_s=config.limits.heartbeat_s,
            bytes_quota=config.hidden_states.bytes_quota,
            keep_steps=config.drafter.train.keep_steps,
            eval_every=config.task.eval_every,
            eval_prompts=eval_prompts,
        )


@dataclass(frozen=True)
class Presence:
    """What is known of one process. `seen_at` is by the scheduler's clock: clocks of other machines may
    differ."""

    started: bool = False
    lost: bool = False
    seen_at: float = 0.0
    worked: bool = False
    """Since it started it has said that it holds a lease."""
    running: int = 0
    tokens_per_s: float = 0.0
    acceptance_length: float = 0.0
    policy_version: int = -1
    drafter_version: int = -1

    @property
    def up(self) -> bool:
        return self.started and not self.lost


@dataclass(frozen=True)
class Slot:
    """One device. `holder` None: nobody's, because its rollout worker found no request."""

    holder: Holder | None = None
    lease: int = 0
    admissions: int = -1
    """`State.admissions` when its rollout worker was last told to look for requests."""
    looked_at: float = 0.0
    """When its rollout worker last said that there are none."""
    recalled_at: float | None = None
    assigned: int = 0
    """Number of the newest shard sent under the current drafter lease."""
    share: tuple[int, int] = (0, 1)
    """Its place among the slots that trained when it was sent, and their number: which shards are its own."""
    lease_idle_s: float = 0.0
    """Share of `slot_idle_s` that passed under the current drafter lease: the most that can count as used."""
    late_lease: int = 0
    late_idle_s: float = 0.0
    """The drafter lease that ended without an answer, and its idle time: a late WorkerYielded still
    counts."""
    barred: str = ""
    barred_at: int = 0
    """Why the trainer gave up by itself, and the count that must grow before it is asked again."""
    rollout: Presence = Presence()
    trainer: Presence = Presence()


class Answer(NamedTuple):
    reward: float
    tokens: int
    drafts: int
    accepted: int
    verified: bool
    """False: the verifier gave no verdict, the reward is 0."""


@dataclass(frozen=True)
class Batch:
    """The requests of one step, or of one evaluation (`step` is then the policy version evaluated). A
    request is known here by prompt × group_size + index."""

    step: int
    purpose: Purpose
    policy_version: int
    prompts: int
    group_size: int
    admitted_at: float
    answers: Mapping[int, Answer] = field(default_factory=dict[int, Answer])
    dead: frozenset[int] = frozenset()
    finished_at: float | None = None

    @property
    def size(self) -> int:
        return self.prompts * self.group_size

    @property
    def outstanding(self) -> int:
        return self.size - len(self.answers) - len(self.dead)


@dataclass(frozen=True)
class Shard:
    """A HiddenShard in the buffer. `number` counts arrivals from 1; `body` is the encoded message."""

    number: int
    shard_id: str
    blob: str
    size: int
    step: int
    held_out: bool
    body: bytes
    policy_version: int = 0
    worth: float = 0.0


@dataclass(frozen=True)
class Training:
    """The learner's turn. `waited_s`: from the moment that the step was ready until the slots were free."""

    step: int
    sent_at: float
    waited_s: float


@dataclass(frozen=True)
class Account:
    """What happened since the last finished step. `used_s` never exceeds `idle_s`, summed from the start of
    the run.

    `unused_s`: idle seconds in which no drafter held the slot, by reason. `yield_seconds`: what each order to give a
    slot back took. `drafter_wait_s`: the learner could have begun, but for a slot that a drafter trainer held.
    `counts`: what was skipped, late or lost."""

    idle_s: float = 0.0
    used_s: float = 0.0
    idle_by_slot: Mapping[int, float] = field(default_factory=dict[int, float])
    used_by_slot: Mapping[int, float] = field(default_factory=dict[int, float])
    unused_s: Mapping[str, float] = field(default_factory=dict[str, float])
    drafter_tokens: int = 0
    yields: int = 0
    yield_seconds: tuple[float, ...] = ()
    drafter_wait_s: float = 0.0
    drafter_versions: int = 0
    dead_letters: int = 0
    counts: Mapping[str, int] = field(default_factory=dict[str, int])


class Duel(NamedTuple):
    """Two drafter versions in the same answers: verify passes with proposals of each, and those whose first proposal
    was right."""

    drafts_before: int = 0
    hits_before: int = 0
    drafts_now: int = 0
    hits_now: int = 0


@dataclass(frozen=True)
class Live:
    """How drafter `version` does in the rollout against those before it, by their number."""

    version: int = 0
    duels: Mapping[int, Duel] = field(default_factory=dict[int, Duel])
    rolled_back: bool = False


class Recent(NamedTuple):
    """Of a finished step, for the progress display."""

    reward: float
    acceptance_length: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class State:
    """`next_step`: the next to admit, None until the first policy version is known; `trained`: steps that
    the learner has done, so also the next to train."""

    settings: Settings
    slots: tuple[Slot, ...]
    accrued_at: float
    next_step: int | None = None
    trained: int = 0
    policy_version: int = -1
    admissions: int = 0
    batches: tuple[Batch, ...] = ()
    ready_at: float | None = None
    training: Training | None = None
    trained_at: float | None = None
    last_eval: int = -1
    evals: Mapping[int, float] = field(default_factory=dict[int, float])
    shards: tuple[Shard, ...] = ()
    shards_seen: int = 0
    drafter_floor: int = 0
    """Drafter versions up to this one were counted in an earlier life of the run."""
    drafter_versions: frozenset[int] = frozenset()
    live: Live = Live()
    began_at: float | None = None
    """When the first rollout worker took a lease: the workers' own start-up is no rollout time."""
    learner: Presence = Presence()
    account: Account = Account()
    recent: tuple[Recent, ...] = ()
    failed: str | None = None
    finished: bool = False

    @property
    def outstanding(self) -> int:
        """Requests without a result, evaluations included."""
        return sum(batch.outstanding for batch in self.batches)

    @property
    def drafter_version(self) -> int:
        return max(self.drafter_versions, default=self.drafter_floor)


def initial_state(settings: Settings, now: float, *, drafter_floor: int = 0) -> State:
    slots = tuple(Slot() for _ in range(settings.slots))
    return State(settings=settings, slots=slots, accrued_at=now, drafter_floor=drafter_floor)


def adopt_settings(state: State, settings: Settings) -> State:
    """The saved state under today's config: more steps, other limits. Raises StateInvalid where requests
    under way don't allow the change."""
    oldest = min((b.policy_version - b.step for b in state.batches if b.purpose == "train"), default=0)
    if -oldest > settings.max_staleness:
        raise StateInvalid(
            f"requests under way were admitted {-oldest} versions ahead and max_staleness is "
            f"{settings.max_staleness} now: set it to {-oldest} until they are trained on"
        )
    if settings.slots < len(state.slots) and state.batches:
        raise StateInvalid(
            f"slots.count was {len(state.slots)} when the requests under way were admitted and is "
            f"{settings.slots} now: resume with {len(state.slots)}"
        )
    slots = [*state.slots, *(Slot() for _ in range(settings.slots - len(state.slots)))][: settings.slots]
    return replace(state, settings=settings, slots=tuple(slots))


_ADAPTER: TypeAdapter[State] = TypeAdapter(State)


def to_bytes(state: State) -> bytes:
    content = {"format": FORMAT, "state": _ADAPTER.dump_python(state)}
    return cast(bytes, msgpack.packb(content, use_bin_type=True, default=_pack_set))


def from_bytes(body: bytes) -> State:
    """Raises StateInvalid."""
    try:
        content: Any = msgpack.unpackb(body, raw=False, strict_map_key=False)
        if content["format"] != FORMAT:
            raise StateInvalid(
                f"the run's saved state has format {content['format']}, this version reads {FORMAT}: go on "
                f"with the version that started the run, or start a new run directory"
            )
        return _ADAPTER.validate_python(content["state"])
    except StateInvalid:
        raise
    except (ValueError, KeyError, TypeError, msgpack.UnpackException, ValidationError) as error:
        first = " ".join(str(error).split())[:200]
        raise StateInvalid(f"the run's saved state can't be read ({first}): start a new run directory") from error


def _pack_set(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(cast(frozenset[int], value))
    raise TypeError(f"{type(value).__name__} has no place in the state")
