"""The drafter trainer of one slot.

Consumes: `slot.<id>.commands.drafter-trainer` (LeaseGranted, ShardsAssigned, LeaseRecalled, DrafterRolledBack,
Shutdown), `weights`.
Publishes: `weights` (drafter), `worker.events` (WorkerYielded).
Waits for: the first policy, the first drafter version (slot 0 makes it where there is none), then a lease.
Unblocked by: LeaseGranted and ShardsAssigned; stopped by LeaseRecalled, between two micro-batches.

What was learned outlives the lease: it is published if held-out documents say that it is better, else kept for the
next lease, and on disk for a process that takes this one's place, and for the other slots to merge with their own.
Judging takes idle time only: a slot that is recalled is given back at once, and what it learned since the last look is
judged when it is idle again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from tlt_pipeline.actor import Actor, run_service
from tlt_pipeline.blobs import check_shard_size, open_hidden_states
from tlt_pipeline.drafter.budget import Budget
from tlt_pipeline.drafter.intake import ShardIntake
from tlt_pipeline.drafter.judging import Judgement
from tlt_pipeline.drafter.start import choose_first_drafter, open_trainer
from tlt_pipeline.drafter.state import StateKeeper, state_path
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.drafter.versions import Versions
from tlt_pipeline.messages import (
    AnyMessage,
    DrafterRolledBack,
    HiddenShard,
    LeaseGranted,
    LeaseRecalled,
    ShardsAssigned,
    Shutdown,
    WeightsPublished,
    WorkerYielded,
    slot_commands,
)
from tlt_pipeline.models.dtypes import choose_dtype
from tlt_pipeline.processes import slot_threads
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightStore

COMMAND_GROUP = "worker"
_POLL_S = 0.5
_SLICE_S = 0.2
"""Training is looked after so often: new shards, a new policy, time to judge."""
_JUDGING_SHARE = 0.15
"""At most so much of the time goes into judging."""
_CHECKPOINT_S = 10.0
T = TypeVar("T")


def main(run_dir: Path, slot: int | None) -> int:
    return run_service("drafter-trainer", slot, run_dir, run_drafter_trainer)


async def run_drafter_trainer(actor: Actor) -> None:
    config = actor.config
    torch.set_num_threads(slot_threads(config))
    with ThreadPoolExecutor(1, "trainer") as thread:
        async with asyncio.TaskGroup() as group:
            spot = await SpotTrainer.start(actor, thread, group)
            following = group.create_task(spot.versions.follow(), name="weights")
            await spot.serve()
            following.cancel()


@dataclass
class Lease:
    number: int
    granted_at: float
    stop: threading.Event = field(default_factory=threading.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = "recalled"
    sent_at: float = 0.0
    stopped_at: float = 0.0
    used_s: float = 0.0
    tokens: int = 0
    began_after_s: float | None = None

    def end(self, reason: str, sent_at: float | None = None) -> None:
        if not self.stop.is_set():
            self.reason = reason
            self.stopped_at, self.sent_at = time.monotonic(), time.time() if sent_at is None else sent_at
            self.stop.set()
            self.changed.set()


class SpotTrainer:
    """Tensors are touched in `thread` alone, so that heartbeats and commands go on while it computes."""

    def __init__(
        self, actor: Actor, trainer: DrafterTrainer, intake: ShardIntake, versions: Versions, group: asyncio.TaskGroup
    ) -> None:
        assert actor.slot is not None
        self.actor, self.bus, self.config, self.slot = actor, actor.bus, actor.config, actor.slot
        self.trainer, self.intake, self.versions, self.group = trainer, intake, versions, group
        self.thread = versions.thread
        self.state = StateKeeper(trainer, state_path(RunDir(actor.run_dir).checkpoints, actor.slot), self.thread)
        self.lease: Lease | None = None
        self.holding: asyncio.Task[None] | None = None
        self.budget = Budget(actor.config.drafter.train.budget)
        self.shards: list[HiddenShard] = []
        self._unjudged_s, self._judging_s = 0.0, 0.0
        self._counted: Counter[str] = Counter()

    @classmethod
    async def start(cls, actor: Actor, thread: ThreadPoolExecutor, group: asyncio.TaskGroup) -> SpotTrainer:
        store = WeightStore.of_run(actor.run_dir, actor.config)
        policy = await actor.wait_for("the learner's first policy version", lambda: actor.bus.latest("policy"))
        assert isinstance(policy, WeightsPublished)
        published = await choose_first_drafter(actor, store, policy)
        loop = asyncio.get_running_loop()
        trainer, decoder = await loop.run_in_executor(thread, open_trainer, actor, store, policy, published)
        taps = trainer.drafter.taps
        check_shard_size(actor.config.hidden_states, (len(taps) + 1) * decoder.hidden_size)
        blobs = open_hidden_states(actor.config.hidden_states, RunDir(actor.run_dir), actor.redis_url)
        dtype = choose_dtype(actor.config.engine.dtype, trainer.device)
        load = partial(store.load_policy, dtype=dtype, device=trainer.device)
        intake = ShardIntake(blobs, trainer.buffer, decoder, actor.config, load, taps)
        actor.gauges.update(policy_version=policy.version, drafter_version=published.version)
        actor.log.info("trainer ready", drafter_version=published.version, device=str(trainer.device))
        return cls(actor, trainer, intake, Versions(actor, store, trainer, thread), group)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    # --- commands -------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Follows commands until Shutdown or a signal; then keeps what was learned."""
        stream = slot_commands(self.slot, "drafter-trainer")
        deliveries = await self.bus.recover(stream, COMMAND_GROUP)
        finished = False
        while not (finished or self.actor.stopping.is_set()):
            for delivery in deliveries:
                finished = finished or isinstance(delivery.message, Shutdown)
                await self._obey(delivery.message)
                await self.bus.ack([delivery])
            deliveries = [] if finished else await self.bus.read(stream, COMMAND_GROUP, count=10, block_s=_POLL_S)
        await self._stop("shutdown" if finished else "stopped")
        await self.versions.settle()
        await self.state.save(self.group)
        await self.state.settle()

    async def _obey(self, message: AnyMessage) -> None:
        match message:
            case LeaseGranted(lease=number):
                await self._begin(number)
            case ShardsAssigned(shards=shards):
                self.shards += shards
                if self.lease is not None:
                    self.lease.changed.set()
            case LeaseRecalled() as recall:
                await self._recall(recall)
            case DrafterRolledBack() as order:
                self.group.create_task(self.versions.roll_back(order), name="roll back")
            case Shutdown():
                pass
            case other:
                raise ValueError(f"a {other.kind} is no command for a drafter trainer")

    async def _begin(self, number: int) -> None:
        if self.lease is not None and self.lease.number >= number:
            return
        await self._stop("superseded")
        self.lease = Lease(number, time.monotonic())
        self.actor.gauges["lease"] = number
        self.holding = self.group.create_task(self._hold(self.lease), name=f"lease {number}")

    async def _recall(self, recall: LeaseRecalled) -> None:
        if self.lease is not None and self.lease.number == recall.lease:
            self.lease.end("recalled", recall.sent_at)
        elif self.lease is None or self.lease.number < recall.lease:  # granted to a process that this one replaces
            unheld = Lease(recall.lease, time.monotonic())
            unheld.end("recalled", recall.sent_at)
            await self._report(unheld)

    async def _stop(self, reason: str) -> None:
        """Ends the lease held, if any, and waits until the slot is free."""
        if self.lease is not None and self.holding is not None:
            self.lease.end(reason)
            await asyncio.wait({self.holding})

    # --- a lease --------------------------------------------------------------------------------------------------

    async def _hold(self, lease: Lease) -> None:
        """Trains until told to stop, or until it doesn't pay; gives the slot back; then saves, which needs no slot."""
        if self.config.drafter.train.enabled:
            await self._resume(lease)
        else:
            lease.end("disabled")
        while not lease.stop.is_set():
            lease.changed.clear()
            if not await self._train(lease) and not lease.stop.is_set():
                await lease.changed.wait()
        await self.run(self.intake.free)
        await self._report(lease)
        self.lease = None
        self.actor.gauges.update(lease=0, tokens_per_s=0.0)
        self.group.create_task(self._save_settled(), name="save")

    async def _resume(self, lease: Lease) -> None:
        """What was learned in earlier leases and not published is judged; training goes on from it, or from the newest
        version where that is better, or rests."""
        await self._take_shards(lease)
        trainer, judgement = self.trainer, None
        behind = trainer.parent != trainer.version
        unjudged = behind or self._unjudged_s >= self.config.drafter.train.publish_every_s / 2
        if (trainer.tokens_since_parent and unjudged) or self.budget.is_resting:
            judgement = await self._judge(lease)
        if lease.stop.is_set():
            return
        if judgement is None or not judgement.worth:
            await self.run(lambda: trainer.choose_start(judgement))
        reason = self.budget.begin(None if judgement is None else judgement.published.acceptance_length)
        if reason is not None:
            lease.end(reason)

    async def _train(self, lease: Lease) -> bool:
        """One slice. False: there is nothing to train on."""
        await self._take_shards(lease)
        progress = await self.run(lambda: self.trainer.train(_SLICE_S, lease.stop.is_set))
        if not progress.steps:
            return bool(self.shards)
        if lease.began_after_s is None:
            lease.began_after_s = time.monotonic() - lease.granted_at - progress.seconds
        lease.used_s += progress.seconds
        lease.tokens += progress.tokens
        self._unjudged_s += progress.seconds
        speed, covered = progress.tokens / progress.seconds, self.trainer.covered
        self.actor.gauges.update(tokens_per_s=speed, vocabulary_covered=covered)
        self.actor.metrics.trained_tokens.inc(progress.tokens)
        patience_s = max(self.config.drafter.train.publish_every_s, self._judging_s / _JUDGING_SHARE)
        if self._unjudged_s >= patience_s and not lease.stop.is_set():
            await self._judge(lease)
        if time.monotonic() - self.state.saved_at > _CHECKPOINT_S:
            await self.state.save(self.group)
        return True

    async def _take_shards(self, lease: Lease) -> None:
        """Those that came, for a slice: states may have to be recomputed."""
        shards, self.shards = self.shards, []
        if shards:
            began = time.monotonic()
            left = await self.run(lambda: self.intake.take(shards, _SLICE_S, lease.stop.is_set))
            self.shards += left
            lease.used_s += time.monotonic() - began

    async def _judge(self, lease: Lease) -> Judgement | None:
        """Publishes what is worth it. Where training has brought too little for too long, the lease ends."""
        began = time.monotonic()
        judgement = await self.versions.judge(lease.stop.is_set)
        took = time.monotonic() - began
        lease.used_s += took
        if judgement is None:
            self._unjudged_s = self._unjudged_s if lease.stop.is_set() else 0.0
            return None
        trained_s, self._unjudged_s, self._judging_s = self._unjudged_s, 0.0, took
        await self.versions.publish_if_worth(judgement, self.group)
        best = judgement.candidate if judgement.worth else judgement.published
        reason = self.budget.note(trained_s, best.acceptance_length, worth=judgement.worth)
        if reason is not None:
            lease.end(reason)
        return judgement

    async def _save_settled(self) -> None:
        """What is being published isn't left behind for others once more."""
        await self.versions.settle()
        await self.state.save(self.group)

    async def _report(self, lease: Lease) -> None:
        """`seconds` by the wall clock from the order, but not less than since it was read: clocks may differ."""
        seconds = max(time.time() - lease.sent_at, time.monotonic() - lease.stopped_at)
        reason = "no_data" if lease.reason == "recalled" and not lease.used_s else lease.reason
        event = WorkerYielded(
            lease=lease.number,
            seconds=seconds,
            trained_s=lease.used_s,
            tokens_trained=lease.tokens,
            reason=reason,
            counts=self._new_counts(),
            **self.actor.stamp(),
        )
        await self.actor.emit(event)
        if not lease.tokens:
            self.actor.metrics.count_skipped(f"lease_{reason}")
        self.actor.log.info(
            "slot given back",
            lease=lease.number,
            reason=reason,
            seconds=round(seconds, 3),
            trained_s=round(lease.used_s, 2),
            tokens=lease.tokens,
            vocabulary_covered=round(self.trainer.covered, 5),
            began_after_s=None if lease.began_after_s is None else round(lease.began_after_s, 3),
            shards=dict(self.intake.counts),
        )

    def _new_counts(self) -> dict[str, int]:
        """What was left undone or decided since the last call, by reason."""
        fine = ("read", "known")
        now = Counter({f"shard_{name}": count for name, count in self.intake.counts.items() if name not in fine})
        for counts in (self.trainer.counts, self.versions.counts, self.versions.left_behind.counts):
            now.update({f"drafter_{name}": count for name, count in counts.items()})
        new, self._counted = now - self._counted, now
        for reason, amount in new.items():
            if not reason.startswith("drafter_merge_"):
                self.actor.metrics.count_skipped(reason, amount)
        return dict(new)
