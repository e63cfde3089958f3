"""Every message that crosses a process border: frozen, typed, msgpack on the wire.

A message is a frozen pydantic model with a literal `kind`. `encode` writes msgpack, `decode` checks the byte
length, then the msgpack limits, then the schema, and raises `InvalidMessage` with one line of reason; nothing is
ever unpickled. Token ids and logprobs travel as raw little-endian bytes with dtype and length (`Array`).
Identities grow only: policy version, drafter version, lease. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, cast

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

SCHEMA_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20

Role = Literal["scheduler", "rollout", "drafter-trainer", "learner"]
Holder = Literal["rollout", "drafter", "learner"]
Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]
ModelKind = Literal["policy", "drafter"]
Claim = Literal["exact", "float32", "distribution"]
"""What may be said of an answer (design 5.1). exact: a repetition is equal to the bit. float32: equal up to ties, about
1 token in 10^5. distribution: equally distributed."""


class InvalidMessage(ValueError):
    """Bytes that are no message of ours; the text says why, in one line."""


class Part(BaseModel):
    """Base of everything inside a message."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Array(Part):
    """A one-dimensional array as raw little-endian bytes."""

    dtype: Literal["int32", "int64", "float32"]
    length: Annotated[int, Field(ge=0)]
    data: bytes

    @model_validator(mode="after")
    def _bytes_fit(self) -> Self:
        if len(self.data) != self.length * np.dtype(self.dtype).itemsize:
            raise ValueError(f"{self.length} × {self.dtype} do not fit {len(self.data)} bytes")
        return self

    @classmethod
    def of(cls, values: Iterable[float] | NDArray[Any], dtype: Literal["int32", "int64", "float32"] = "int32") -> Array:
        listed: Any = cast(Any, values) if isinstance(values, np.ndarray) else list(values)
        array = np.asarray(listed, dtype=np.dtype(dtype).newbyteorder("<"))
        return cls(dtype=dtype, length=array.size, data=array.tobytes())

    def numpy(self) -> NDArray[Any]:
        """Read-only view of shape [length]."""
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<"))

    def tolist(self) -> list[Any]:
        return self.numpy().tolist()


class BlobRef(Part):
    """A claim check: a file in the blob store, by base name, with its size and hash."""

    name: str
    size: Annotated[int, Field(ge=0)]
    sha256: str


class Sampling(Part):
    """How one answer is drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the filter off."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1)]
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class DrafterUse(Part):
    """What one drafter version did for one answer: verify passes with its proposals, and those of them in which the
    first proposal was right."""

    version: int
    drafts: int
    hits: int


class DraftStats(Part):
    """What speculation did for one answer. acceptance length = 1 + accepted / drafts, `drafts` verify passes that
    had a proposal."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    decode_steps: int = 0
    drafter_versions: tuple[int, ...] = ()
    drafters: tuple[DrafterUse, ...] = ()
    """One for each of `drafter_versions`, in the order of their first use."""


class Message(Part):
    """Base of the messages."""

    schema_version: Literal[1] = 1


# --- work: rollout.requests, rollout.completions ---------------------------------------------------------------


class RolloutRequest(Message):
    """One answer to write. Its tokens are a function of (policy_version, prompt, sampling, seed) alone."""

    kind: Literal["rollout_request"] = "rollout_request"
    request_id: str
    group_id: str
    step: int
    index: int
    purpose: Purpose = "train"
    policy_version: int
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    prompt: Array
    sampling: Sampling
    source: str
    """Name of the task source whose verifier scores the answer."""
    entry: str
    """JSON of what that verifier needs: the data set's entry."""


class Completion(Message):
    """A finished request. `logprobs`: of each drawn token under the distribution sampled from (temperature and
    filters applied); `policy_logprobs`: under the unfiltered one at that temperature. All arrays: [tokens]."""

    kind: Literal["completion"] = "completion"
    request_id: str
    group_id: str
    step: int
    index: int
    purpose: Purpose
    policy_version: int
    seed: int
    prompt: Array
    tokens: Array
    logprobs: Array
    policy_logprobs: Array
    finish_reason: FinishReason
    reward: float
    claim: Claim
    reward_error: str | None = None
    """Why the verifier gave no verdict (timeout, exception); the reward is then 0 and counted."""
    draft: DraftStats
    slot: int
    attempt: int
    started_at: float
    finished_at: float


class DeadLetter(Message):
    """Work that was given up, with the reason and the original bytes."""

    kind: Literal["dead_letter"] = "dead_letter"
    stream: str
    entry_id: str
    reason: str
    attempts: int
    body: bytes
    request_id: str | None = None


# --- hidden_states ---------------------------------------------------------------------------------------------


class HiddenShard(Message):
    """A piece of drafter-training data in the blob store (format: tlt_pipeline/drafter/shards.py)."""

    kind: Literal["hidden_shard"] = "hidden_shard"
    shard_id: str
    blob: BlobRef
    slot: int
    step: int
    policy_version: int
    documents: int
    tokens: int
    held_out: bool
    worth: float = 0.0
    """What a token of it is worth to training: which shards go first where there are too many."""


# --- weights (broadcast) ---------------------------------------------------------------------------------------


class WeightsPublished(Message):
    """A new immutable weight set. `path` is relative to the weights root; `parent` the version it was trained from."""

    kind: Literal["weights_published"] = "weights_published"
    model: ModelKind
    version: int
    parent: int
    policy_version: int
    step: int
    path: str
    size: int
    sha256: str
    metrics: dict[str, float] = {}
    final: bool = False
    """The run is over with this policy version: subscribers finish."""


# --- worker.events ---------------------------------------------------------------------------------------------


class WorkerEvent(Message):
    slot: int = -1
    worker: str
    at: float


class WorkerStarted(WorkerEvent):
    """A process is up (again). `slot` is -1 for the learner."""

    kind: Literal["worker_started"] = "worker_started"
    role: Role


class WorkerHeartbeat(WorkerEvent):
    """Sent every `limits.heartbeat_s`, at a change of `lease` at once."""

    kind: Literal["worker_heartbeat"] = "worker_heartbeat"
    role: Role
    lease: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    acceptance_length: float = 0.0
    policy_version: int = -1
    drafter_version: int = -1


class WorkerIdle(WorkerEvent):
    """A rollout worker found no request and runs none; its KV cache is freed. It waits for the next lease."""

    kind: Literal["worker_idle"] = "worker_idle"
    lease: int


class WorkerYielded(WorkerEvent):
    """A drafter trainer gave its slot back. `seconds`: from the Yield command to here; `reason`: recalled, no_data,
    budget_…, error: …; `counts`: what it left undone, or decided, since it last said so."""

    kind: Literal["worker_yielded"] = "worker_yielded"
    lease: int
    seconds: float
    trained_s: float
    tokens_trained: int
    reason: str
    counts: dict[str, int] = {}


class StepTrained(WorkerEvent):
    """The learner finished step `step`; `policy_version` is the version it published."""

    kind: Literal["step_trained"] = "step_trained"
    step: int
    policy_version: int
    trained: int
    learner_s: float
    metrics: dict[str, float] = {}


class RunFailed(WorkerEvent):
    """Something that ends the run: NaN in the loss, a policy that can't be loaded. One line with the remedy; `code`: 2
    where it is the user's to mend, else 3 (tlt_pipeline.failures)."""

    kind: Literal["run_failed"] = "run_failed"
    reason: str
    code: int = 3


# --- slot.<id>.commands and learner.commands --------------------------------------------------------------------


class LeaseGranted(Message):
    """`holder` may use the slot from now on. Events carry the lease number; older ones are ignored."""

    kind: Literal["lease_granted"] = "lease_granted"
    slot: int
    holder: Holder
    lease: int


class ShardsAssigned(Message):
    """Drafter-training data for the holder of `lease`."""

    kind: Literal["shards_assigned"] = "shards_assigned"
    slot: int
    lease: int
    shards: tuple[HiddenShard, ...]


class LeaseRecalled(Message):
    """Give the slot back within `deadline_s`, keep what was learned, answer WorkerYielded."""

    kind: Literal["lease_recalled"] = "lease_recalled"
    slot: int
    lease: int
    deadline_s: float
    sent_at: float


class DrafterRolledBack(Message):
    """Rollouts accept clearly less of drafter `version` than of the one before: publish the weights of version `to`
    again, as a new version."""

    kind: Literal["drafter_rolled_back"] = "drafter_rolled_back"
    slot: int
    version: int
    to: int


class TrainStep(Message):
    """The learner's order: these completions (by request id), at this policy version, are step `step`."""

    kind: Literal["train_step"] = "train_step"
    step: int
    policy_version: int
    request_ids: tuple[str, ...]
    dead: int = 0


class Shutdown(Message):
    """The run is over: drain, checkpoint, exit 0."""

    kind: Literal["shutdown"] = "shutdown"
    reason: str


AnyMessage = (
    RolloutRequest
    | Completion
    | DeadLetter
    | HiddenShard
    | WeightsPublished
    | WorkerStarted
    | WorkerHeartbeat
    | WorkerIdle
    | WorkerYielded
    | StepTrained
    | RunFailed
    | LeaseGranted
    | ShardsAssigned
    | LeaseRecalled
    | DrafterRolledBack
    | TrainStep
    | Shutdown
)
_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(Annotated[AnyMessage, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """Raises ValueError above MAX_MESSAGE_BYTES: larger content belongs in the blob store."""
    body = cast(bytes, msgpack.packb(message.model_dump(mode="python"), use_bin_type=True))
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{type(message).__name__} has {len(body)} bytes, the limit is {MAX_MESSAGE_BYTES}: send a BlobRef instead"
        )
    return body


def decode(body: bytes) -> AnyMessage:
    """Bytes to message. Raises InvalidMessage, and nothing else, for whatever the bytes are."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"{len(body)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        content: Any = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            timestamp=0,
            max_ext_len=0,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=65_536,
            max_map_len=1024,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidMessage(_one_line(f"not msgpack within the limits: {error}")) from error
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidMessage(_one_line(f"{where or 'body'}: {first['msg']}")) from error


def _one_line(reason: str) -> str:
    """Bounded too: the reason may quote what was sent."""
    return " ".join(reason.split())[:300]


# --- names of streams --------------------------------------------------------------------------------------------

REQUESTS = "rollout.requests"
COMPLETIONS = "rollout.completions"
HIDDEN_STATES = "hidden_states"
WEIGHTS = "weights"
EVENTS = "worker.events"
DEAD_LETTERS = "dead_letters"
LEARNER_COMMANDS = "learner.commands"


def slot_commands(slot: int, role: Literal["rollout", "drafter-trainer"]) -> str:
    """The command stream of one role on one slot: each has one reader, so that nobody reads another's orders."""
    return f"slot.{slot}.commands.{role}"
