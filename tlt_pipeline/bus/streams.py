"""What each stream of a run is: who reads it, what belongs on it, when an entry may go. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlt_pipeline import messages as m


@dataclass(frozen=True)
class StreamRule:
    """`groups`: the consumer groups that read the stream. `removal`: an entry goes when its one group has
    acknowledged it (`ack`), when every group has (`all`), or never (`keep`). `limited`: after
    `limits.max_attempts` deliveries the entry is a dead letter; results and events aren't limited, because a
    reader that restarts often must not lose them."""

    groups: tuple[str, ...]
    accepts: tuple[type[m.Message], ...]
    removal: Literal["ack", "all", "keep"] = "ack"
    limited: bool = True


_RULES: dict[str, StreamRule] = {
    m.REQUESTS: StreamRule(("rollout",), (m.RolloutRequest,)),
    m.COMPLETIONS: StreamRule(("scheduler", "learner"), (m.Completion,), removal="all", limited=False),
    m.EVENTS: StreamRule(("scheduler",), (m.WorkerEvent,), limited=False),
    m.HIDDEN_STATES: StreamRule(("scheduler",), (m.HiddenShard,), limited=False),
    m.DEAD_LETTERS: StreamRule(("scheduler",), (m.DeadLetter,), removal="keep", limited=False),
    m.WEIGHTS: StreamRule((), (m.WeightsPublished,), removal="keep"),
    m.LEARNER_COMMANDS: StreamRule(("learner",), (m.TrainStep, m.Shutdown), limited=False),
}
_COMMANDS = (m.LeaseGranted, m.LeaseRecalled, m.ShardsAssigned, m.DrafterRolledBack, m.Shutdown)
_SLOT_COMMANDS = StreamRule(("worker",), _COMMANDS)


def stream_rule(stream: str) -> StreamRule:
    """Raises KeyError for a stream that no process of ours has."""
    if stream.startswith("slot."):
        return _SLOT_COMMANDS
    return _RULES[stream]


@dataclass(frozen=True)
class Delivery:
    """An entry handed to this consumer. `attempt` counts from 1 and was counted before this delivery; `body`
    is the entry as it was sent."""

    stream: str
    group: str
    entry_id: str
    message: m.AnyMessage
    attempt: int
    body: bytes


@dataclass(frozen=True)
class Outgoing:
    """A message to add in a commit; with `dedupe_id` it is submitted: skipped if that id was seen before."""

    stream: str
    message: m.Message
    dedupe_id: str | None = None


@dataclass(frozen=True)
class Keys:
    """Names of a run's keys on the server."""

    run_id: str

    def stream(self, stream: str) -> str:
        return f"tlt:{self.run_id}:{stream}"

    def seen(self, stream: str, dedupe_id: str) -> str:
        return f"tlt:{self.run_id}:seen:{stream}:{dedupe_id}"

    def call(self, token: str) -> str:
        return f"tlt:{self.run_id}:call:{token}"

    def latest(self, name: str) -> str:
        return f"tlt:{self.run_id}:latest:{name}"

    def state(self, name: str) -> str:
        return f"tlt:{self.run_id}:state:{name}"

    def token(self, name: str) -> str:
        return f"tlt:{self.run_id}:state:{name}:token"

    def version(self, model: str) -> str:
        return f"tlt:{self.run_id}:version:{model}"

    def buried(self, stream: str, entry_id: str) -> str:
        return f"tlt:{self.run_id}:buried:{stream}:{entry_id}"

    def blob(self, name: str) -> str:
        return f"tlt:{self.run_id}:blob:{name}"

    def blobs(self) -> str:
        """Their names and sizes."""
        return f"tlt:{self.run_id}:blobs"
