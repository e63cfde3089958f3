"""Settings, processes and messages of the runs in scheduling_world.py."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tlt_pipeline import messages as m
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.state import Settings

LEASE_S, MAX_ATTEMPTS, DEADLINE_S, TIMEOUT_S = 8.0, 3, 1.0, 4.0


def random_settings(random: Random) -> Settings:
    return Settings(
        steps=random.randint(1, 4),
        prompts=random.randint(1, 3),
        group_size=random.randint(1, 4),
        slots=random.randint(1, 6),
        max_staleness=random.randint(0, 3),
        colocated=random.random() < 0.5,
        train_drafter=random.random() < 0.9,
        deadline_s=DEADLINE_S,
        worker_timeout_s=TIMEOUT_S,
        bytes_quota=40,
        keep_steps=random.randint(1, 2),
        eval_every=random.choice([0, 0, 1, 2, 3]),
        eval_prompts=random.randint(0, 3),
    )


class Clock:
    """Virtual time with an agenda, and how much goes wrong."""

    def __init__(self, seed: int, trouble: float) -> None:
        self.random = Random(seed)
        self.trouble = trouble * self.random.choice([0.0, 0.3, 1.0])
        self.now = 1000.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now + delay, next(self.order), action))

    def chance(self, share: float) -> bool:
        return self.random.random() < share * self.trouble


@dataclass
class Request:
    version: int
    attempts: int = 0
    owner: str | None = None
    owned_at: float = 0.0
    settled: bool = False


@dataclass
class Rollout:
    slot: int
    up: bool = False
    life: int = 0
    lease: int = 0
    running: set[str] = field(default_factory=set)
    commands: deque[e.GrantLease] = field(default_factory=deque)


@dataclass
class Trainer:
    slot: int
    up: bool = False
    life: int = 0
    lease: int = 0
    since: float = 0.0
    recalled_at: float | None = None
    commands: deque[e.GrantLease | e.RecallLease] = field(default_factory=deque)


def stamp(role: str, slot: int, now: float) -> dict[str, Any]:
    return {"slot": slot, "worker": f"{role}-{slot}", "at": now}


def heartbeat(role: Any, slot: int, lease: int, now: float) -> m.WorkerHeartbeat:
    return m.WorkerHeartbeat(role=role, lease=lease, **stamp(role, slot, now))


def weights(model: Any, version: int) -> m.WeightsPublished:
    facts = {"parent": 0, "policy_version": version, "step": 0, "path": "p", "size": 1, "sha256": ""}
    return m.WeightsPublished(model=model, version=version, **facts)


def letter(name: str) -> m.DeadLetter:
    facts = {"stream": m.REQUESTS, "entry_id": "1-1", "attempts": 3, "body": b""}
    return m.DeadLetter(reason="too many attempts", request_id=name, **facts)


def shard(number: int, step: int, size: int, *, held_out: bool) -> m.HiddenShard:
    blob = m.BlobRef(name=f"b{number}", size=size, sha256="")
    facts = {"slot": 0, "policy_version": step, "documents": 1, "tokens": 9, "held_out": held_out}
    return m.HiddenShard(shard_id=blob.name, blob=blob, step=step, **facts)
