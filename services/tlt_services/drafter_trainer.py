"""The drafter trainer of one slot.

Consumes: `slot.<id>.commands.drafter-trainer` (LeaseGranted, ShardsAssigned, LeaseRecalled, Shutdown), `weights`.
Publishes: `weights` (drafter), `worker.events` (WorkerYielded).
Waits for: the first policy, the first drafter version (slot 0 makes it where there is none), then a lease.
Unblocked by: LeaseGranted and ShardsAssigned; stopped by LeaseRecalled, between two micro-batches.

What was learned outlives the lease: it is published if held-out documents say that it is better, else kept for the
next lease, and on disk for a process that takes this one's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from tlt_pipeline.actor import Actor, run_service
from tlt_pipeline.blobs import open_hidden_states
from tlt_pipeline.drafter.intake import ShardIntake
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.start import choose_first_drafter, load_frozen, open_trainer
from tlt_pipeline.drafter.state import state_path, take_snapshot, write_snapshot
from tlt_pipeline.drafter.trainer import Candidate, DrafterTrainer, Judgement
from tlt_pipeline.messages import (
    WEIGHTS,
    AnyMessage,
    HiddenShard,
    LeaseGranted,
    LeaseRecalled,
    ShardsAssigned,
    Shutdown,
    WeightsPublished,
    WorkerYielded,
    slot_commands,
)
from tlt_pipeline.processes import usable_cores
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightsMissing, WeightStore

COMMAND_GROUP = "worker"
_POLL_S = 0.5
_SLICE_S = 0.2
"""Training is looked after so often: new shards, a new policy, time to judge."""
_JUDGING_SHARE = 0.1
"""At most so much of the time goes into judging."""
_CHECKPOINT_S = 10.0
T = TypeVar("T")


def main(run_dir: Path, slot: int | None) -> int:
    return run_service("drafter-trainer", slot, run_dir, run_drafter_trainer)


async def run_drafter_trainer(actor: Actor) -> None:
    config = actor.config
    torch.set_num_threads(config.engine.threads or max(usable_cores() // config.slots.count, 1))
    with ThreadPoolExecutor(1, "trainer") as thread:
        async with asyncio.TaskGroup() as group:
            spot = await SpotTrainer.start(actor, thread, group)
            following = group.create_task(spot.follow_weights(), name="weights")
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
    deadline_s: float = 0.0
    used_s: float = 0.0
    tokens: int = 0
    first_step_s: float | None = None

    def end(self, reason: str, deadline_s: float, sent_at: float | None = None) -> None:
        if not self.stop.is_set():
            self.reason, self.deadline_s = reason, deadline_s
            self.stopped_at, self.sent_at = time.monotonic(), time.time() if sent_at is None else sent_at
            self.stop.set()
            self.changed.set()


class SpotTrainer:
    """Tensors are touched in `thread` alone, so that heartbeats and commands go on while it computes."""

    def __init__(
        self, actor: Actor, thread: ThreadPoolExecutor, group: asyncio.TaskGroup, store: WeightStore,
        trainer: DrafterTrainer, intake: ShardIntake,
    ) -> None:  # fmt: skip
        assert actor.slot is not None
        self.actor, self.bus, self.config = actor, actor.bus, actor.config
        self.thread, self.group = thread, group
        self.slot, self.store, self.trainer, self.intake = actor.slot, store, trainer, intake
        self.lease: Lease | None = None
        self.holding: asyncio.Task[None] | None = None
        self.shards: list[HiddenShard] = []
        self.publishing: asyncio.Task[None] | None = None
        self.saving: asyncio.Task[None] | None = None
        self._saved_steps, self._saved_at = trainer.steps, time.monotonic()
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
        blobs = open_hidden_states(actor.config.hidden_states, RunDir(actor.run_dir))
        intake = ShardIntake(blobs, trainer.buffer, decoder, actor.config.drafter.train.tokens_per_batch)
        actor.gauges.update(policy_version=policy.version, drafter_version=published.version)
        actor.log.info("trainer ready", drafter_version=published.version, device=str(trainer.device))
        return cls(actor, thread, group, store, trainer, intake)

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
        for task in (self.publishing, self.saving):
            if task is not None:
                await task
        await self._save()

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
            self.lease.end("recalled", recall.deadline_s, recall.sent_at)
        elif self.lease is None or self.lease.number < recall.lease:  # granted to a process that this one replaces
            unheld = Lease(recall.lease, time.monotonic())
            unheld.end("recalled", recall.deadline_s, recall.sent_at)
            await self._report(unheld)

    async def _stop(self, reason: str) -> None:
        """Ends the lease held, if any, and waits until the slot is free."""
        if self.lease is not None and self.holding is not None:
            self.lease.end(reason, self.config.slots.preempt_deadline_s)
            await asyncio.wait({self.holding})

    # --- a lease --------------------------------------------------------------------------------------------------

    async def _hold(self, lease: Lease) -> None:
        """Trains until told to stop; gives the slot back; then publishes and saves, which needs no slot."""
        if not self.config.drafter.train.enabled:
            lease.end("disabled", 0.0)
        await self.run(self.trainer.choose_start)
        while not lease.stop.is_set():
            lease.changed.clear()
            if not await self._train(lease) and not lease.stop.is_set():
                await lease.changed.wait()
        judgement = await self._judge_last(lease)
        await self._report(lease)
        self.lease = None
        self.actor.gauges.update(lease=0, tokens_per_s=0.0)
        if judgement is not None:
            await self._publish_if_worth(judgement)
        await self._save()

    async def _train(self, lease: Lease) -> bool:
        """One slice. False: there is nothing to train on."""
        shards, self.shards = self.shards, []
        if shards:
            await self.run(lambda: self.intake.take(shards))
        progress = await self.run(lambda: self.trainer.train(_SLICE_S, lease.stop.is_set))
        if not progress.steps:
            return False
        if lease.first_step_s is None:
            lease.first_step_s = time.monotonic() - lease.granted_at - progress.seconds
        lease.used_s += progress.seconds
        lease.tokens += progress.tokens
        self._unjudged_s += progress.seconds
        self.actor.gauges["tokens_per_s"] = progress.tokens / progress.seconds
        self.actor.metrics.trained_tokens.inc(progress.tokens)
        patience_s = max(self.config.drafter.train.publish_every_s, self._judging_s / _JUDGING_SHARE)
        if self._unjudged_s >= patience_s and not lease.stop.is_set():
            judgement = await self._judge(lease, lease.stop.is_set)
            if judgement is not None:
                await self._publish_if_worth(judgement)
        if time.monotonic() - self._saved_at > _CHECKPOINT_S:
            await self._save()
        return True

    async def _judge(self, lease: Lease, should_stop: Callable[[], bool]) -> Judgement | None:
        began = time.monotonic()
        judgement = await self.run(lambda: self.trainer.judge(should_stop))
        took = time.monotonic() - began
        lease.used_s += took
        if judgement is not None:
            self._unjudged_s, self._judging_s = 0.0, took
        return judgement

    async def _judge_last(self, lease: Lease) -> Judgement | None:
        """At the end of a lease, where there is something to judge and a quarter of the deadline suffices."""
        until = lease.stopped_at + lease.deadline_s / 2
        learned = self._unjudged_s >= self.config.drafter.train.publish_every_s / 2
        if not learned or self._judging_s > lease.deadline_s / 4:
            return None
        return await self._judge(lease, lambda: time.monotonic() > until)

    async def _report(self, lease: Lease) -> None:
        """`seconds` by the wall clock from the order, but not less than since it was read: clocks may differ."""
        seconds = max(time.time() - lease.sent_at, time.monotonic() - lease.stopped_at)
        reason = "no_data" if lease.reason == "recalled" and not lease.tokens else lease.reason
        event = WorkerYielded(
            lease=lease.number,
            seconds=seconds,
            trained_s=lease.used_s,
            tokens_trained=lease.tokens,
            reason=reason,
            **self.actor.stamp(),
        )
        await self.actor.emit(event)
        self._count_skipped()
        if not lease.tokens:
            self.actor.metrics.count_skipped(f"lease_{reason}")
        self.actor.log.info(
            "slot given back",
            lease=lease.number,
            reason=reason,
            seconds=round(seconds, 3),
            trained_s=round(lease.used_s, 2),
            tokens=lease.tokens,
            first_step_s=None if lease.first_step_s is None else round(lease.first_step_s, 3),
            waited=dict(self.intake.counts),
        )

    def _count_skipped(self) -> None:
        fine = ("read", "known")
        now = Counter({f"shard_{name}": count for name, count in self.intake.counts.items() if name not in fine})
        now.update({f"drafter_{name}": count for name, count in self.trainer.counts.items()})
        for reason, amount in (now - self._counted).items():
            self.actor.metrics.count_skipped(reason, amount)
        self._counted = now

    # --- versions -------------------------------------------------------------------------------------------------

    async def _publish_if_worth(self, judgement: Judgement) -> None:
        found = {"loss": judgement.candidate.loss, "published_loss": judgement.published.loss}
        facts = {name: round(value, 4) for name, value in found.items()}
        if not judgement.worth:
            self.actor.metrics.count_skipped("drafter_not_better")
            self.actor.log.info("drafter not published: not better", drafter_version=self.trainer.version, **facts)
        elif self.publishing is not None and not self.publishing.done():
            self.actor.metrics.count_skipped("drafter_still_publishing")
        else:
            candidate = await self.run(self.trainer.candidate)
            self.publishing = self.group.create_task(self._publish(candidate, judgement), name="publish")

    async def _publish(self, candidate: Candidate, judgement: Judgement) -> None:
        kept = self.store.versions("drafter")
        version = await self.bus.next_version("drafter", above=kept[-1] if kept else 0)
        metrics = {
            "loss": judgement.candidate.loss,
            "published_loss": judgement.published.loss,
            "acceptance_length": judgement.candidate.acceptance_length,
            "published_acceptance_length": judgement.published.acceptance_length,
            "tokens_trained": float(candidate.tokens_trained),
        }
        published = await asyncio.to_thread(
            self.store.write_drafter,
            version,
            candidate.drafter,
            parent=candidate.parent,
            policy_version=candidate.policy_version,
            step=candidate.policy_version,
            metrics=metrics,
        )
        await self.run(lambda: self.trainer.adopt(version, candidate))
        await self.bus.broadcast(WEIGHTS, published, latest="drafter")
        self.actor.metrics.published.inc()
        self.actor.gauges["drafter_version"] = self.trainer.version
        shown = {name: round(value, 4) for name, value in metrics.items()}
        self.actor.log.info("drafter published", drafter_version=version, **shown)

    async def follow_weights(self) -> None:
        """The policy's frozen parts and the others' drafters, the newest of each, as they are published."""
        last = "0"
        while True:
            heard = await self.bus.listen(WEIGHTS, last, block_s=2.0)
            newest: dict[str, WeightsPublished] = {}
            for last, message in heard:
                if isinstance(message, WeightsPublished):
                    newest[message.model] = message
            for published in newest.values():
                try:
                    await self._follow(published)
                except WeightsMissing as error:  # pruned: a newer one is on its way
                    self.actor.metrics.count_skipped("weights_pruned")
                    self.actor.log.warning("weights not loaded", reason=str(error))

    async def _follow(self, published: WeightsPublished) -> None:
        trainer = self.trainer
        if published.model == "policy" and published.version > trainer.frozen.policy_version:
            frozen: FrozenParts = await asyncio.to_thread(load_frozen, self.store, published, trainer.device)
            await self.run(lambda: trainer.set_policy(frozen))
            self.actor.gauges["policy_version"] = published.version
        elif published.model == "drafter" and published.version > trainer.version:
            config = trainer.drafter.config
            drafter = await asyncio.to_thread(self.store.load_drafter, published, config)
            await self.run(lambda: trainer.follow(published.version, drafter))
            self.actor.gauges["drafter_version"] = trainer.version

    # --- state ----------------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Copies the state and writes it beside whatever comes next; one write at a time."""
        if self.trainer.steps == self._saved_steps:
            return
        if self.saving is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self.saving
        snapshot = await self.run(lambda: take_snapshot(self.trainer))
        self._saved_steps, self._saved_at = snapshot.facts["steps"], time.monotonic()
        path = state_path(RunDir(self.actor.run_dir).checkpoints, self.slot)
        self.saving = self.group.create_task(asyncio.to_thread(write_snapshot, snapshot, path), name="save")
