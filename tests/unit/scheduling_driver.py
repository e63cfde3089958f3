"""Tells the scheduler's core events one by one, with time given by hand."""

from __future__ import annotations

from typing import Any

from tlt_pipeline import messages as m
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.decisions import decide
from tlt_pipeline.scheduling.ids import RequestId
from tlt_pipeline.scheduling.state import Settings, initial_state


class Driver:
    """A run whose events are told one by one; `said` holds the commands since the last look."""

    def __init__(self, **changes: Any) -> None:
        chosen: dict[str, Any] = {"steps": 2, "prompts": 1, "group_size": 2, "slots": 2, **changes}
        self.now = 100.0
        self.state = initial_state(Settings(**chosen), self.now)
        self.said: list[e.Command] = []

    def tell(self, event: e.Event, after: float = 0.0) -> list[e.Command]:
        self.now += after
        self.state, commands = decide(self.state, event, self.now)
        self.said += commands
        return commands

    def look(self, kind: type) -> list[Any]:
        """Commands of this kind since the last look at it."""
        found = [command for command in self.said if isinstance(command, kind)]
        self.said = [command for command in self.said if not isinstance(command, kind)]
        return found

    def stamp(self, role: str, slot: int) -> dict[str, Any]:
        return {"slot": slot, "worker": f"{role}-{slot}", "at": self.now}

    def start(self, *, trainers: bool = True, policy: bool = True) -> None:
        for slot in range(len(self.state.slots)):
            self.started("rollout", slot)
            if trainers:
                self.started("drafter-trainer", slot)
        if policy:
            self.policy(0)

    def started(self, role: Any, slot: int) -> list[e.Command]:
        return self.tell(m.WorkerStarted(role=role, **self.stamp(role, slot)))

    def beat(self, *, without: tuple[str, ...] = (), after: float = 0.0) -> None:
        """All workers but those named are alive."""
        self.now += after
        for slot in range(len(self.state.slots)):
            for role in ("rollout", "drafter-trainer"):
                if f"{role}-{slot}" not in without:
                    self.tell(m.WorkerHeartbeat(role=role, **self.stamp(role, slot)))

    def weights(self, model: Any, version: int) -> list[e.Command]:
        facts = {"parent": 0, "policy_version": 0, "step": 0, "path": "", "size": 0, "sha256": ""}
        return self.tell(m.WeightsPublished(model=model, version=version, **facts))

    def policy(self, version: int) -> list[e.Command]:
        return self.weights("policy", version)

    def idle(self, slot: int, after: float = 0.0) -> list[e.Command]:
        lease = self.state.slots[slot].lease
        self.now += after
        return self.tell(m.WorkerIdle(lease=lease, **self.stamp("rollout", slot)))

    def yielded(self, slot: int, lease: int | None = None, **facts: Any) -> list[e.Command]:
        told = {"seconds": 0.1, "trained_s": 0.0, "tokens_trained": 0, "reason": "recalled", **facts}
        lease = self.state.slots[slot].lease if lease is None else lease
        return self.tell(m.WorkerYielded(lease=lease, **told, **self.stamp("drafter-trainer", slot)))

    def answer(self, step: int, index: int, purpose: Any = "train", after: float = 0.0, **facts: Any) -> None:
        version = next(b.policy_version for b in self.state.batches if (b.step, b.purpose) == (step, purpose))
        prompt, index = divmod(index, self.state.settings.group_size if purpose == "train" else 1)
        told = {"reward": 1.0, "tokens": 10, "policy_version": version, **facts}
        self.tell(e.CompletionSeen(str(RequestId(purpose, step, prompt, index)), **told), after)

    def trained(self, step: int, after: float = 1.0) -> list[e.Command]:
        self.now += after
        facts = {"trained": 2, "learner_s": after, "policy_version": step + 1}
        return self.tell(m.StepTrained(step=step, **facts, **self.stamp("learner", -1)))

    def shard(
        self, number: int, *, step: int = 0, size: int = 10, held_out: bool = False, worth: float = 0.0
    ) -> list[e.Command]:
        blob = m.BlobRef(name=f"b{number}", size=size, sha256="")
        facts: dict[str, Any] = {"slot": 0, "policy_version": step, "documents": 1, "tokens": 5}
        shard = m.HiddenShard(shard_id=f"h{number}", blob=blob, step=step, held_out=held_out, worth=worth, **facts)
        return self.tell(shard)

    def holders(self) -> list[str | None]:
        return [slot.holder for slot in self.state.slots]


def letter(name: str | None, stream: str = m.REQUESTS) -> m.DeadLetter:
    facts = {"entry_id": "1-1", "attempts": 3, "body": b""}
    return m.DeadLetter(stream=stream, reason="too many attempts", request_id=name, **facts)
