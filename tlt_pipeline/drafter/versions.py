"""Drafter versions as a trainer sees them: its own, published; those of others, followed; and the policy's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tlt_pipeline.actor import Actor
from tlt_pipeline.drafter.start import load_frozen
from tlt_pipeline.drafter.trainer import Candidate, DrafterTrainer, Judgement
from tlt_pipeline.messages import WEIGHTS, WeightsPublished
from tlt_pipeline.weights import WeightsMissing, WeightStore

_LISTEN_S = 2.0


class Versions:
    """`trainer` is touched in `thread` alone; files are read and written beside it."""

    def __init__(self, actor: Actor, store: WeightStore, trainer: DrafterTrainer, thread: ThreadPoolExecutor) -> None:
        self.actor, self.bus, self.store = actor, actor.bus, store
        self.trainer, self.thread = trainer, thread
        self.publishing: asyncio.Task[None] | None = None

    async def publish_if_worth(self, judgement: Judgement, group: asyncio.TaskGroup) -> None:
        """In the background, one at a time. What isn't published is counted with its reason."""
        facts = {name: round(value, 4) for name, value in _measures(judgement).items()}
        if not judgement.worth:
            self.actor.metrics.count_skipped("drafter_not_better")
            self.actor.log.info("drafter not published: not better", drafter_version=self.trainer.version, **facts)
        elif self.publishing is not None and not self.publishing.done():
            self.actor.metrics.count_skipped("drafter_still_publishing")
        else:
            loop = asyncio.get_running_loop()
            candidate = await loop.run_in_executor(self.thread, self.trainer.candidate)
            self.publishing = group.create_task(self._publish(candidate, judgement), name="publish")

    async def settle(self) -> None:
        """Waits for a publication that is under way."""
        if self.publishing is not None:
            await self.publishing

    async def _publish(self, candidate: Candidate, judgement: Judgement) -> None:
        kept = self.store.versions("drafter")
        version = await self.bus.next_version("drafter", above=kept[-1] if kept else 0)
        metrics = {**_measures(judgement), "tokens_trained": float(candidate.tokens_trained)}
        published = await asyncio.to_thread(
            self.store.write_drafter,
            version,
            candidate.drafter,
            parent=candidate.parent,
            policy_version=candidate.policy_version,
            step=candidate.policy_version,
            metrics=metrics,
        )
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.thread, self.trainer.adopt, version, candidate)
        await self.bus.broadcast(WEIGHTS, published, latest="drafter")
        self.actor.metrics.published.inc()
        self.actor.gauges["drafter_version"] = self.trainer.version
        shown = {name: round(value, 4) for name, value in metrics.items()}
        self.actor.log.info("drafter published", drafter_version=version, **shown)

    async def follow(self) -> None:
        """Loads the policy's frozen parts and the others' drafters as they are published, the newest of each."""
        last = "0"
        while True:
            heard = await self.bus.listen(WEIGHTS, last, block_s=_LISTEN_S)
            newest = {message.model: message for _, message in heard if isinstance(message, WeightsPublished)}
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
            drafter = await asyncio.to_thread(self.store.load_drafter, published, trainer.drafter.config)
            await loop.run_in_executor(self.thread, trainer.follow, published.version, drafter)
            self.actor.gauges["drafter_version"] = trainer.version


def _measures(judgement: Judgement) -> dict[str, float]:
    found: dict[str, float] = {}
    for prefix, held_out in (("", judgement.candidate), ("published_", judgement.published)):
        found[f"{prefix}loss"] = held_out.loss
        found[f"{prefix}acceptance_length"] = held_out.acceptance_length
        found[f"{prefix}cross_entropy"] = held_out.cross_entropy
    return found
