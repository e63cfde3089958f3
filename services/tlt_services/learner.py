"""The learner.

Consumes: `learner.commands` (TrainStep, Shutdown) and `rollout.completions`, both in the group `learner`.
Publishes: `weights` (policy), `worker.events` (StepTrained). Waits for: an order, then for each completion
that it names. Unblocked by: the scheduler, whose order comes once all completions are in and the slots it
needs are free.

Each step is trained once. Completions and the order are acknowledged in the same transaction that reports the
step, after its weights are on disk and broadcast. Killed before the weights were written, it trains the step
again from the same bits; killed after, it finds them, broadcasts them again and reports the step from them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

from tlt_pipeline.actor import Actor, run_service
from tlt_pipeline.bus.link import BusFull
from tlt_pipeline.bus.streams import Delivery, Outgoing
from tlt_pipeline.config import RunConfig
from tlt_pipeline.failures import RunFatal
from tlt_pipeline.learner.compute import compute_reproducibly, use_threads
from tlt_pipeline.learner.gathering import Batch, Gathering
from tlt_pipeline.learner.lineage import Lineage
from tlt_pipeline.learner.optimizer import NonFiniteUpdate
from tlt_pipeline.learner.trainer import StepInterrupted
from tlt_pipeline.messages import (
    COMPLETIONS,
    EVENTS,
    LEARNER_COMMANDS,
    WEIGHTS,
    Shutdown,
    StepTrained,
    TrainStep,
    WeightsPublished,
)
from tlt_pipeline.processes import usable_cores
from tlt_pipeline.weights import WeightsMissing

GROUP = "learner"
_STATE = "learner"
_READ_S = 0.5
_READ_COUNT = 256
T = TypeVar("T")


def main(run_dir: Path, slot: int | None) -> int:
    return run_service("learner", None, run_dir, run_learner)


async def run_learner(actor: Actor) -> None:
    with ThreadPoolExecutor(1, "learner") as thread:
        learner = await Learner.start(actor, thread)
        reading = asyncio.create_task(learner.gather(), name="completions")
        orders = asyncio.create_task(learner.follow_orders(), name="orders")
        try:
            await asyncio.wait({reading, orders}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, orders):
                if task.done():
                    task.result()
        finally:
            learner.quitting.set()
            for task in (reading, orders):
                task.cancel()
            await asyncio.wait({reading, orders})
            await learner.run(learner.lineage.checkpoint)


class Learner:
    """All tensors live in one thread of their own, so that heartbeats go on while it computes."""

    def __init__(self, actor: Actor, thread: ThreadPoolExecutor, lineage: Lineage) -> None:
        self.actor, self.bus, self.config = actor, actor.bus, actor.config
        self.thread = thread
        self.lineage = lineage
        self.gathering = Gathering(lineage.trainer.version, self.config.max_staleness)
        self.quitting = threading.Event()
        self._counted: Counter[str] = Counter()

    @classmethod
    async def start(cls, actor: Actor, thread: ThreadPoolExecutor) -> Learner:
        """Loads or begins the line of versions, and sees to it that the others know its newest."""

        def open_lineage() -> Lineage:
            threads = use_threads(choose_threads(actor.config))
            lineage = Lineage.open(actor.config, actor.run_dir, actor.log)
            compute_reproducibly(lineage.trainer.scoring.device)
            actor.log.info("learner ready", threads=threads, device=str(lineage.trainer.scoring.device))
            return lineage

        lineage = await asyncio.get_running_loop().run_in_executor(thread, open_lineage)
        learner = cls(actor, thread, lineage)
        await learner.bus.load_state(_STATE)
        await learner._publish(lineage.published)
        return learner

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    # --- receiving ---------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Takes completions as they come; first those that an earlier process of this name held."""
        deliveries = await self.bus.recover(COMPLETIONS, GROUP)
        while True:
            await self.bus.ack(self.gathering.add(deliveries))
            if deliveries:
                self._count_dropped()
            deliveries = await self.bus.read(COMPLETIONS, GROUP, count=_READ_COUNT, block_s=_READ_S)

    async def follow_orders(self) -> None:
        """Returns at Shutdown, or when this process is asked to stop."""
        deliveries = await self.bus.recover(LEARNER_COMMANDS, GROUP)
        while not self.actor.stopping.is_set():
            for delivery in deliveries:
                if isinstance(delivery.message, Shutdown):
                    await self.bus.ack([delivery])
                    return
                assert isinstance(delivery.message, TrainStep)
                await self._obey(delivery, delivery.message)
                if self.actor.stopping.is_set():
                    return
            deliveries = await self.bus.read(LEARNER_COMMANDS, GROUP, count=8, block_s=_READ_S)

    # --- one step ----------------------------------------------------------------------------------------------

    async def _obey(self, delivery: Delivery, order: TrainStep) -> None:
        version = self.lineage.trainer.version
        if order.step < version:
            await self._report_again(delivery, order)
            return
        if (order.step, order.policy_version) != (version, version):
            raise RunFatal(
                f"asked to train step {order.step} at policy version {order.policy_version}, but the newest weights "
                f"are version {version}: weights/ and Redis are not of one run; start in a new run directory"
            )
        await self._await_completions(order)
        try:
            await self._train(delivery, order)
        except StepInterrupted as stop:
            self.actor.log.info(str(stop), step=order.step)

    async def _await_completions(self, order: TrainStep) -> None:
        """Until all are here, or nothing was left to be read for limits.worker_timeout_s: they were queued before their
        order, so what is missing then couldn't be decoded, and is in `dead_letters`."""
        nothing_left_since: float | None = None
        patience_s = self.config.limits.worker_timeout_s

        async def settled() -> bool:
            nonlocal nothing_left_since
            if not self.gathering.missing(order):
                return True
            if await self.bus.depth(COMPLETIONS, GROUP):
                nothing_left_since = None
            elif nothing_left_since is None:
                nothing_left_since = time.monotonic()
            return nothing_left_since is not None and time.monotonic() - nothing_left_since > patience_s

        count = len(self.gathering.missing(order))
        if count:
            await self.actor.wait_for(f"{count} completions of step {order.step} (rollout workers)", settled)
        lost = self.gathering.missing(order)
        if lost:
            self.actor.metrics.count_skipped("completion_lost", len(lost))
            remedy = "see why in dead_letters: do all services run the same version?"
            self.actor.log.error("completions lost, training without them", lost=lost[:5], count=len(lost), hint=remedy)

    async def _train(self, delivery: Delivery, order: TrainStep) -> None:
        began = time.monotonic()
        batch = self.gathering.take(order)
        await self._refuse(batch, order)
        self.actor.log.info("training", step=order.step, completions=len(batch.completions), dead=order.dead)
        trainer = self.lineage.trainer
        try:
            metrics = await self.run(lambda: trainer.train_step(batch.completions, self._should_stop))
        except NonFiniteUpdate as error:
            await self._give_up(order, error)
        trained_at = time.monotonic()
        published = await self.run(lambda: self.lineage.extend(order.step, metrics))
        await self._publish(published)
        seconds = time.monotonic() - began
        facts = {**metrics.as_floats(), "stale": len(batch.refused), "write_s": time.monotonic() - trained_at}
        self.actor.metrics.trained_tokens.inc(metrics.tokens_trained)
        self._count_dropped()
        await self._report(delivery, order, batch, facts, seconds)
        shown = ("reward_mean", "loss", "grad_norm", "entropy", "zero_variance_groups", "rollout_gap_mean")
        self.actor.log.info(
            "step trained",
            step=order.step,
            policy_version=published.version,
            seconds=round(seconds, 2),
            **{name: round(facts[name], 5) for name in shown},
        )

    def _should_stop(self) -> bool:
        return self.quitting.is_set() or self.actor.stopping.is_set()

    async def _refuse(self, batch: Batch, order: TrainStep) -> None:
        for delivery in batch.refused:
            reason = f"too old for step {order.step} (max_staleness {self.config.max_staleness})"
            await self.bus.dead_letter(delivery, reason)

    async def _give_up(self, order: TrainStep, error: NonFiniteUpdate) -> NoReturn:
        """The step can't be trained: keeps the last good state, ends the run."""
        kept = await self.run(self.lineage.checkpoint)
        where = f"{self.lineage.published.path} and its optimizer state" if kept else self.lineage.published.path
        raise RunFatal(
            f"step {order.step} gave {error}; the last good policy is {where}: lower learner.lr or "
            f"learner.max_grad_norm and go on with --resume"
        ) from error

    async def _report(
        self, delivery: Delivery, order: TrainStep, batch: Batch, facts: dict[str, float], seconds: float
    ) -> None:
        event = StepTrained(
            step=order.step,
            policy_version=order.step + 1,
            trained=len(batch.completions),
            learner_s=seconds,
            metrics=facts,
            **self.actor.stamp(),
        )
        await self._commit([delivery, *batch.deliveries], event)
        await self.bus.ack(self.gathering.close(order))

    async def _report_again(self, delivery: Delivery, order: TrainStep) -> None:
        """The step was trained before this process started, or its report was lost."""
        try:
            metrics = self.lineage.store.find("policy", order.step + 1).metrics
        except WeightsMissing:
            metrics = {}
        event = StepTrained(
            step=order.step,
            policy_version=order.step + 1,
            trained=int(metrics.get("completions", len(order.request_ids))),
            learner_s=metrics.get("seconds", 0.0),
            metrics=metrics,
            **self.actor.stamp(),
        )
        self.actor.log.info("step was trained already", step=order.step)
        await self._commit([delivery], event)

    # --- sending -----------------------------------------------------------------------------------------------

    async def _publish(self, published: WeightsPublished) -> None:
        """A version is broadcast at least once: also again after a restart, if the others may not know it."""
        if await self.bus.latest("policy") != published:
            await self.bus.broadcast(WEIGHTS, published, latest="policy")
            self.actor.metrics.published.inc()
        self.actor.gauges["policy_version"] = published.version

    async def _commit(self, acks: list[Delivery], event: StepTrained) -> None:
        async def commit() -> bool:
            try:
                await self.bus.commit(
                    state_key=_STATE, state=str(event.step).encode(), acks=acks, appends=[Outgoing(EVENTS, event)]
                )
            except BusFull:
                return False
            return True

        if not await commit():
            await self.actor.wait_for("room in worker.events (is the scheduler running?)", commit)

    def _count_dropped(self) -> None:
        for reason, amount in (self.gathering.counts - self._counted).items():
            if reason != "evaluation":
                self.actor.metrics.count_skipped(f"completion_{reason}", amount)
        self._counted = self.gathering.counts.copy()


def choose_threads(config: RunConfig) -> int:
    """All cores where the slots are free while the learner computes; its share of them otherwise."""
    if config.learner.threads or config.learner.colocated:
        return config.learner.threads
    return max(1, usable_cores() // (config.slots.count + 1))
