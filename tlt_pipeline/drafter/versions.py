"""Drafter versions as a trainer sees them: its own, published; those of others, followed; and the policy's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tlt_pipeline.actor import Actor
from tlt_pipeline.drafter.judging import Candidate, Judgement
from tlt_pipeline.drafter.merging import ROLLED_BACK, Lineage, Work
from tlt_pipeline.drafter.start import load_frozen
from tlt_pipeline.drafter.state import MOST_OTHERS, LeftBehind, state_path
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.messages import WEIGHTS, DrafterRolledBack, WeightsPublished
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightsMissing, WeightStore

_LISTEN_S = 2.0


class Versions:
    """`trainer` is touched in `thread` alone; files are read and written beside it. `counts`: versions refused, by
    reason."""

    def __init__(self, actor: Actor, store: WeightStore, trainer: DrafterTrainer, thread: ThreadPoolExecutor) -> None:
        assert actor.slot is not None
        self.actor, self.bus, self.store = actor, actor.bus, store
        self.trainer, self.thread = trainer, thread
        self.lineage = Lineage()
        self.left_behind = LeftBehind(state_path(RunDir(actor.run_dir).checkpoints, actor.slot))
        self._others: list[Work] = []
        self.publishing: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()

    async def judge(self, should_stop: Callable[[], bool]) -> Judgement | None:
        """The trainer's own work, and what other slots have learned and not published, against the published one."""
        found = await asyncio.to_thread(self.left_behind.read, self.trainer.published)
        others = [work for work in [*found, *self._others] if not self.lineage.is_refused(work.parent)][:MOST_OTHERS]
        merges = self.trainer.counts["merge_tried"]
        loop = asyncio.get_running_loop()
        judgement = await loop.run_in_executor(self.thread, self.trainer.judge, should_stop, others, self.lineage)
        used = judgement is not None and (judgement.worth or self.trainer.counts["merge_tried"] > merges)
        self._others = [] if used else others
        return judgement

    async def publish_if_worth(self, judgement: Judgement, group: asyncio.TaskGroup) -> bool:
        """In the background, one at a time. What isn't published is counted with its reason."""
        facts = {name: round(value, 4) for name, value in _measures(judgement).items()}
        if not judgement.worth:
            self.counts["refused_not_better"] += 1
            self.actor.log.info("drafter not published: not better", drafter_version=self.trainer.version, **facts)
            return False
        if self.publishing is not None and not self.publishing.done():
            self.counts["refused_still_publishing"] += 1
            return False
        loop = asyncio.get_running_loop()
        candidate = await loop.run_in_executor(self.thread, self.trainer.candidate, judgement)
        self.publishing = group.create_task(self._publish(candidate, judgement), name="publish")
        return True

    async def settle(self) -> None:
        """Waits for a publication that is under way."""
        if self.publishing is not None:
            await self.publishing

    async def _publish(self, candidate: Candidate, judgement: Judgement) -> None:
        metrics = {**_measures(judgement), "tokens_trained": float(candidate.tokens_trained)}
        if judgement.better is not None:
            metrics[judgement.better.origin] = 1.0
        published = await self._write(
            candidate.drafter, parent=candidate.parent, policy_version=candidate.policy_version, metrics=metrics
        )
        self.lineage.note(published)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.thread, self.trainer.adopt, published.version, candidate)
        await self._announce(published)

    async def _write(self, drafter: Drafter, *, policy_version: int, **facts: Any) -> WeightsPublished:
        kept = self.store.versions("drafter")
        version = await self.bus.next_version("drafter", above=kept[-1] if kept else 0)
        facts = {"policy_version": policy_version, "step": policy_version, **facts}
        return await asyncio.to_thread(self.store.write_drafter, version, drafter, **facts)

    async def _announce(self, published: WeightsPublished) -> None:
        await self.bus.broadcast(WEIGHTS, published, latest="drafter")
        self.actor.metrics.published.inc()
        self.actor.gauges["drafter_version"] = self.trainer.version
        shown = {name: round(value, 4) for name, value in published.metrics.items()}
        self.actor.log.info("drafter published", drafter_version=published.version, parent=published.parent, **shown)

    async def roll_back(self, order: DrafterRolledBack) -> None:
        """Publishes an earlier version's weights as a new version. This trainer hears of it as the others do."""
        try:
            earlier = await asyncio.to_thread(self.store.find, "drafter", order.to)
            drafter = await asyncio.to_thread(self.store.load_drafter, earlier, self.trainer.drafter.policy_config)
        except WeightsMissing as error:
            self.counts["rollback_version_gone"] += 1
            self.actor.log.warning("drafter not rolled back", reason=str(error))
            return
        metrics = {ROLLED_BACK: float(order.version), "tokens_trained": 0.0}
        published = await self._write(drafter, policy_version=earlier.policy_version, parent=order.to, metrics=metrics)
        await self._announce(published)

    async def follow(self) -> None:
        """Loads the policy's frozen parts and the others' drafters as they are published, the newest of each."""
        last = "0"
        while True:
            heard = await self.bus.listen(WEIGHTS, last, block_s=_LISTEN_S)
            newest = {message.model: message for _, message in heard if isinstance(message, WeightsPublished)}
            for _, message in heard:
                if isinstance(message, WeightsPublished) and message.model == "drafter":
                    self.lineage.note(message)
            last = heard[-1][0] if heard else last
            for published in newest.values():
                try:
                    await self._load(published)
                except WeightsMissing as error:  # pruned: a newer one is on its way
                    self.actor.metrics.count_skipped("weights_pruned")
                    self.actor.log.warning("weights not loaded", reason=str(error))

    async def _load(self, published: WeightsPublished) -> None:
        trainer, loop = self.trainer, asyncio.get_running_loop()
        if published.model == "policy" and published.version > trainer.frozen.policy_version:
            frozen = await asyncio.to_thread(load_frozen, self.store, published, trainer.device)
            await loop.run_in_executor(self.thread, trainer.set_policy, frozen)
            self.actor.gauges["policy_version"] = published.version
        elif published.model == "drafter" and published.version > trainer.version:
            drafter = await asyncio.to_thread(self.store.load_drafter, published, trainer.drafter.policy_config)
            await loop.run_in_executor(self.thread, trainer.follow, published.version, drafter)
            if self.lineage.is_refused(trainer.parent):
                await loop.run_in_executor(self.thread, trainer.restart_from_published)
            self.actor.gauges["drafter_version"] = trainer.version


def _measures(judgement: Judgement) -> dict[str, float]:
    found: dict[str, float] = {}
    for prefix, held_out in (("", judgement.candidate), ("published_", judgement.published)):
        found[f"{prefix}loss"] = held_out.loss
        found[f"{prefix}acceptance_length"] = held_out.acceptance_length
        found[f"{prefix}cross_entropy"] = held_out.cross_entropy
    return found
