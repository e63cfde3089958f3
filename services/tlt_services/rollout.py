"""The rollout worker of one slot.

Consumes: `slot.<id>.commands.rollout` (LeaseGranted, Shutdown), `rollout.requests` while it holds the lease, `weights`.
Publishes: `rollout.completions`, `hidden_states`, `worker.events` (WorkerIdle).
Waits for: the first policy, the first drafter where speculation was asked for, then a lease.
Unblocked by: LeaseGranted; a request. Between two leases its KV cache is freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import torch

from tlt_pipeline.actor import Actor, run_service
from tlt_pipeline.bus.streams import Delivery
from tlt_pipeline.engine.rollout_engine import Output, RolloutEngine
from tlt_pipeline.messages import (
    REQUESTS,
    LeaseGranted,
    RolloutRequest,
    Shutdown,
    WeightsPublished,
    WorkerIdle,
    slot_commands,
)
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.processes import slot_threads
from tlt_pipeline.weights import WeightsMissing, WeightStore
from tlt_services.loading import Loading, start_engine
from tlt_services.observing import StrategyMetrics, describe
from tlt_services.settling import Settling

GROUP = "rollout"
COMMAND_GROUP = "worker"
_POLL_S = 0.2
_EMPTY_READ_S = 0.02
"""A read that finds nothing for so long, with nothing running, means that the slot is idle."""


def main(run_dir: Path, slot: int | None) -> int:
    return run_service("rollout", slot, run_dir, run_rollout)


async def run_rollout(actor: Actor) -> None:
    worker = await RolloutWorker.start(actor)
    try:
        async with asyncio.TaskGroup() as group:
            works = (worker.loading.follow(), worker.renew_leases(), worker.measure(), worker.watch_failures())
            beside = [group.create_task(work) for work in works]
            await worker.serve()
            for task in beside:
                task.cancel()
    finally:
        await worker.close()


class RolloutWorker:
    def __init__(self, actor: Actor, store: WeightStore, tokenizer: Tokenizer, engine: RolloutEngine) -> None:
        assert actor.slot is not None
        self.actor, self.bus, self.slot = actor, actor.bus, actor.slot
        self.engine = engine
        self.settling = Settling(actor, tokenizer, engine.claim)
        self.loading = Loading(actor, store, self.engine, idle=lambda: not (self.settling.held or self.lease))
        self.strategies = StrategyMetrics(actor.metrics)
        self.lease = 0
        self.finished = False
        self.changed = asyncio.Event()
        self.in_engine = 0
        self.postponed: list[RolloutRequest] = []
        """Requests for another policy version: they wait until the engine is empty."""

    @classmethod
    async def start(cls, actor: Actor) -> RolloutWorker:
        """Loads the policy (and the drafter that speculation needs) and decides what this run may claim."""
        config = actor.config
        # one slot's share of the cores: oversubscribed threads cost up to 50 times
        torch.set_num_threads(slot_threads(config))
        store = WeightStore.of_run(actor.run_dir, config)
        published = await actor.wait_for("the learner's first policy version", lambda: actor.bus.latest("policy"))
        assert isinstance(published, WeightsPublished)
        tokenizer = load_tokenizer(store.root / published.path)
        workers: list[RolloutWorker] = []  # nothing comes out of an engine before the worker submits something
        engine = await start_engine(
            actor, store, tokenizer, published.version, lambda output: workers[0]._on_output(output)
        )
        actor.log.info(
            "engine ready", engine=actor.config.engine.type, claim=engine.claim, policy_version=engine.policy_version
        )
        actor.gauges["policy_version"] = engine.policy_version
        worker = cls(actor, store, tokenizer, engine)
        workers.append(worker)
        await worker.loading.load_first_drafter()
        return worker

    async def close(self) -> None:
        await self.engine.close()
        await self.settling.close(crashed=self.engine.failure.done() or self.settling.failed.done())
        account = self.engine.account
        self.strategies.update(account)
        self.actor.log.info("strategies", **describe(account))

    # --- leases and requests ---

    async def serve(self) -> None:
        """Follows commands; decodes while the lease is held; until Shutdown or a signal."""
        stream = slot_commands(self.slot, "rollout")
        pending = await self.bus.recover(stream, COMMAND_GROUP)
        while not (self.finished or self.actor.stopping.is_set()):
            for delivery in pending or await self.bus.read(stream, COMMAND_GROUP, count=10, block_s=_POLL_S):
                self._obey(delivery)
                await self.bus.ack([delivery])
            pending = []
            if self.lease and not self.finished:
                await self._decode_until_idle()

    def _obey(self, delivery: Delivery) -> None:
        match delivery.message:
            case LeaseGranted() as granted:
                self.lease = granted.lease
                self.actor.gauges["lease"] = granted.lease
            case Shutdown():
                self.finished = True
            case other:
                raise ValueError(f"a {other.kind} is no command for a rollout worker")

    async def _decode_until_idle(self) -> None:
        """Pulls requests as the batch has room, until none is left and none runs; then gives the slot up."""
        await self.loading.settled()
        await self._take(await self.bus.recover(REQUESTS, GROUP))
        while not self.actor.stopping.is_set():
            self.changed.clear()
            if self.postponed and not self.in_engine:
                await self._change_policy()
            elif not self.postponed and self.in_engine < self.actor.config.engine.max_batch:
                if await self._pull():
                    continue
                if not self.in_engine:
                    await self._become_idle()
                    return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _POLL_S)

    async def _pull(self) -> bool:
        """New requests into the room there is, or those of a worker that died. False: there are none."""
        room = self.actor.config.engine.max_batch - self.in_engine
        found = await self.bus.read(REQUESTS, GROUP, count=room, block_s=0.0 if self.in_engine else _EMPTY_READ_S)
        found = found or await self.bus.claim(REQUESTS, GROUP, count=room)
        await self._take(found)
        return bool(found)

    async def _take(self, deliveries: list[Delivery]) -> None:
        requests: list[RolloutRequest] = []
        for delivery in deliveries:
            request = delivery.message
            assert isinstance(request, RolloutRequest)
            self.settling.held[request.request_id] = delivery
            requests.append(request)
        self._submit(requests)
        if self.postponed and not self.in_engine:
            await self._change_policy()

    def _submit(self, requests: list[RolloutRequest]) -> None:
        """Gives requests of the loaded policy to the engine; the others wait until it is empty."""
        loaded = self.engine.policy_version
        ready = [request for request in requests if request.policy_version == loaded]
        self.postponed += [request for request in requests if request.policy_version != loaded]
        self.in_engine += len(ready)
        self.actor.gauges["running"] = self.in_engine
        self.engine.submit(ready)

    async def _change_policy(self) -> None:
        """The engine is empty: load the version of the oldest postponed request. Requests for a version that is gone
        can't be answered any more."""
        version = self.postponed[0].policy_version
        try:
            await self.loading.load_policy(version)
        except WeightsMissing as error:
            for request in [each for each in self.postponed if each.policy_version == version]:
                self.postponed.remove(request)
                await self.settling.refuse(request, str(error))
            return
        postponed, self.postponed = self.postponed, []
        self._submit(postponed)

    async def _become_idle(self) -> None:
        await self.settling.drained()
        await self.engine.free()
        lease, self.lease = self.lease, 0
        self.actor.gauges.update(lease=0, running=0, tokens_per_s=0.0)
        await self.actor.emit(WorkerIdle(lease=lease, **self.actor.stamp()))

    def _on_output(self, output: Output) -> None:
        self.in_engine -= len(output.finished) + len(output.refused)
        self.actor.gauges["running"] = self.in_engine
        self.settling.settle(output)
        self.changed.set()

    # --- beside the decoding ---

    async def renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.actor.config.limits.lease_s / 4)
            if self.settling.held:
                await self.bus.renew(list(self.settling.held.values()))

    async def measure(self) -> None:
        """Tokens a second and acceptance length of the last second, for heartbeats."""
        committed, drafts, accepted, moment = 0, 0, 0, time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            self.strategies.update(self.engine.account)
            now, total = time.monotonic(), self.engine.tokens_committed
            new_drafts, new_accepted = self.settling.drafts - drafts, self.settling.accepted - accepted
            self.actor.gauges["tokens_per_s"] = (total - committed) / (now - moment)
            if new_drafts:
                self.actor.gauges["acceptance_length"] = 1 + new_accepted / new_drafts
            committed, drafts, accepted = total, self.settling.drafts, self.settling.accepted
            moment = now

    async def watch_failures(self) -> None:
        """Ends the process with the engine's own error, or the first one met while results were settled."""
        failures = {self.engine.failure, self.settling.failed}
        await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                failure.result()
