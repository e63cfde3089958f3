"""The rollout worker of one slot.

Consumes: `slot.<id>.commands.rollout` (LeaseGranted, Shutdown), `rollout.requests` while it holds the lease, `weights`.
Publishes: `rollout.completions`, `hidden_states`, `worker.events` (WorkerIdle).
Waits for: the first policy, the first drafter where speculation was asked for, then a lease.
Unblocked by: LeaseGranted; a request. Between two leases its KV cache is freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tlt_pipeline.actor import Actor, run_service
from tlt_pipeline.blobs import open_hidden_states
from tlt_pipeline.bus.streams import Delivery
from tlt_pipeline.drafter.streaming import ShardStream
from tlt_pipeline.engine.engine import Engine, FeaturePiece, Finished
from tlt_pipeline.engine.loop import EngineLoop, Output
from tlt_pipeline.messages import (
    COMPLETIONS,
    HIDDEN_STATES,
    REQUESTS,
    WEIGHTS,
    Array,
    Completion,
    HiddenShard,
    LeaseGranted,
    RolloutRequest,
    Shutdown,
    WeightsPublished,
    WorkerIdle,
    slot_commands,
)
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.tasks.pool import VerifierPool
from tlt_pipeline.weights import WeightStore

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
            tasks = [
                group.create_task(work)
                for work in (
                    worker.follow_weights(),
                    worker.renew_leases(),
                    worker.measure(),
                    worker.watch_engine(),
                )
            ]
            await worker.serve()
            for task in tasks:
                task.cancel()
    finally:
        await worker.close()


@dataclass
class Work:
    """Requests that this worker holds, by request id, and those that wait for another policy version."""

    held: dict[str, Delivery] = field(default_factory=dict)
    in_engine: int = 0
    postponed: list[Delivery] = field(default_factory=list)
    settling: set[asyncio.Task[None]] = field(default_factory=set)


class RolloutWorker:
    def __init__(self, actor: Actor, store: WeightStore, tokenizer: Tokenizer, engine: Engine) -> None:
        assert actor.slot is not None
        self.actor, self.bus, self.config = actor, actor.bus, actor.config
        self.slot, self.store, self.tokenizer = actor.slot, store, tokenizer
        self.engine = EngineLoop(engine, self._on_output)
        self.verifiers = VerifierPool(self.config.task)
        blobs = open_hidden_states(self.config.hidden_states, RunDir(actor.run_dir))
        self.shards = ShardStream(blobs, self.config.hidden_states, self.slot, actor.worker)
        self.work = Work()
        self.lease = 0
        self.finished = False
        self.changed = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drafts, self._accepted = 0, 0

    # --- start and end --------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, actor: Actor) -> RolloutWorker:
        """Loads the policy (and the drafter that speculation needs) and decides what this run may claim."""
        set_threads(actor)
        store = WeightStore.of_run(actor.run_dir, actor.config)
        published = await actor.wait_for("the learner's first policy version", lambda: actor.bus.latest("policy"))
        assert isinstance(published, WeightsPublished)
        tokenizer = load_tokenizer(store.root / published.path)
        engine = await asyncio.to_thread(_build_engine, actor, store, tokenizer, published.version)
        actor.log.info("engine ready", claim=engine.claim, exact=engine.exact, policy_version=engine.policy_version)
        worker = cls(actor, store, tokenizer, engine)
        if actor.config.engine.speculation.drafter == "eagle":
            await worker._load_first_drafter()
        return worker

    async def _load_first_drafter(self) -> None:
        published = await self.actor.wait_for(
            "the first drafter version (is drafter-trainer --slot 0 running?)",
            lambda: self.bus.latest("drafter"),
        )
        assert isinstance(published, WeightsPublished)
        await self._load_drafter(published)

    async def close(self) -> None:
        await self.engine.close()
        for task in self.work.settling:
            task.cancel()
        await asyncio.gather(*self.work.settling, return_exceptions=True)
        unfinished = [*self.work.held.values()]
        if unfinished:
            await self.bus.release(unfinished)
        await asyncio.to_thread(self.verifiers.close)

    # --- leases and requests --------------------------------------------------------------------------------------

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
        await self._take(await self.bus.recover(REQUESTS, GROUP))
        while not self.actor.stopping.is_set():
            self.changed.clear()
            if self.work.postponed and not self.work.in_engine:
                await self._change_policy()
            room = self.config.engine.max_batch - self.work.in_engine
            if room and not self.work.postponed:
                busy = self.work.in_engine > 0
                found = await self.bus.read(REQUESTS, GROUP, count=room, block_s=0.0 if busy else _EMPTY_READ_S)
                found = found or await self.bus.claim(REQUESTS, GROUP, count=room)
                await self._take(found)
                if not found and not self.work.in_engine:
                    break
                if found:
                    continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _POLL_S)
        await self._become_idle()

    async def _take(self, deliveries: list[Delivery]) -> None:
        """Gives requests of the loaded policy to the engine; the others wait until it has drained."""
        ready: list[RolloutRequest] = []
        for delivery in deliveries:
            request = delivery.message
            assert isinstance(request, RolloutRequest)
            self.work.held[request.request_id] = delivery
            if request.policy_version == self.engine.engine.policy_version:
                ready.append(request)
            else:
                self.work.postponed.append(delivery)
        self.work.in_engine += len(ready)
        self.actor.gauges["running"] = self.work.in_engine
        self.engine.submit(ready)
        if self.work.postponed and not self.work.in_engine:
            await self._change_policy()

    async def _change_policy(self) -> None:
        """The engine is empty: load the version of the oldest postponed request."""
        first = self.work.postponed[0].message
        assert isinstance(first, RolloutRequest)
        await self._load_policy(first.policy_version)
        postponed, self.work.postponed = self.work.postponed, []
        await self._take(postponed)

    async def _become_idle(self) -> None:
        await self._publish(self.shards.flush())
        if self.work.settling:
            await asyncio.wait(self.work.settling)
        if self.actor.stopping.is_set():
            return
        await self.engine.free()
        lease, self.lease = self.lease, 0
        self.actor.gauges.update(lease=0, running=0, tokens_per_s=0.0)
        await self.actor.emit(WorkerIdle(lease=lease, **self.actor.stamp()))

    # --- results --------------------------------------------------------------------------------------------------

    def _on_output(self, output: Output) -> None:
        self.work.in_engine -= len(output.finished) + len(output.refused)
        self.actor.gauges["running"] = self.work.in_engine
        if output.pieces:
            self._spawn(self._stream(output.pieces))
        for finished in output.finished:
            self._spawn(self._settle(finished))
        for request, reason in output.refused:
            self._spawn(self._refuse(request, reason))
        self.changed.set()

    def _spawn(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.work.settling.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self.work.settling.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError("unknown"))

    async def _settle(self, finished: Finished) -> None:
        """Scores an answer and turns its request into a completion, in one step on the bus."""
        request = finished.request
        delivery = self.work.held[request.request_id]
        stops = set(request.sampling.stop_token_ids)
        text = self.tokenizer.decode([token for token in finished.tokens if token not in stops])
        verdict = await self.verifiers.score(request.source, request.entry, text)
        if verdict.error:
            self.actor.metrics.count_skipped("verifier_failed")
            self.actor.log.warning("no verdict", request=request.request_id, reason=verdict.error)
        self._drafts += finished.draft.drafts
        self._accepted += finished.draft.accepted
        completion = _completion(finished, verdict.reward, verdict.error, self.slot, delivery.attempt)
        if not await self.bus.complete(delivery, COMPLETIONS, completion):
            self.actor.metrics.count_skipped("settled_by_another")
        self.work.held.pop(request.request_id, None)

    async def _refuse(self, request: RolloutRequest, reason: str) -> None:
        delivery = self.work.held.pop(request.request_id)
        self.actor.log.error("request refused", request=request.request_id, reason=reason)
        await self.bus.dead_letter(delivery, reason)

    async def _stream(self, pieces: list[FeaturePiece]) -> None:
        await self._publish([shard for piece in pieces for shard in self.shards.add(piece)])

    async def _publish(self, shards: list[HiddenShard]) -> None:
        for shard in shards:
            await self.bus.append(HIDDEN_STATES, shard)

    # --- beside the decoding ------------------------------------------------------------------------------------------

    async def follow_weights(self) -> None:
        """Loads every new drafter at once, and a new policy as soon as the engine is empty."""
        last = "0"
        while True:
            for entry_id, message in await self.bus.listen(WEIGHTS, last, block_s=1.0):
                last = entry_id
                if not isinstance(message, WeightsPublished):
                    continue
                if message.model == "drafter" and message.version > self.engine.engine.drafter_version:
                    await self._load_drafter(message)
                elif message.model == "policy" and not self.work.held and not self.lease:
                    await self._load_policy(message.version)

    async def _load_policy(self, version: int) -> None:
        if version == self.engine.engine.policy_version:
            return
        weight = self.engine.engine.policy.embed.weight
        policy = await asyncio.to_thread(self.store.load_policy, version, dtype=weight.dtype, device=weight.device)
        await self.engine.set_policy(policy, version)
        self.actor.gauges["policy_version"] = version

    async def _load_drafter(self, published: WeightsPublished) -> None:
        if self.config.engine.speculation.drafter == "off":
            return
        policy = self.engine.engine.policy
        weight = policy.embed.weight
        drafter = await asyncio.to_thread(
            self.store.load_drafter, published, policy.config, dtype=weight.dtype, device=weight.device
        )
        self.engine.set_drafter(drafter, published.version)
        self.actor.gauges["drafter_version"] = published.version
        self.actor.log.info("drafter loaded", drafter_version=published.version)

    async def renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.config.limits.lease_s / 4)
            if self.work.held:
                await self.bus.renew(list(self.work.held.values()))

    async def measure(self) -> None:
        """Tokens a second and acceptance length of the last second, for heartbeats."""
        committed, drafts, accepted, moment = 0, 0, 0, time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            now, total = time.monotonic(), self.engine.engine.tokens_committed
            new_drafts, new_accepted = self._drafts - drafts, self._accepted - accepted
            self.actor.gauges["tokens_per_s"] = (total - committed) / (now - moment)
            if new_drafts:
                self.actor.gauges["acceptance_length"] = 1 + new_accepted / new_drafts
            committed, drafts, accepted, moment = total, self._drafts, self._accepted, now

    async def watch_engine(self) -> None:
        """Ends the process with the engine's own error, or the first one met while results were settled."""
        await asyncio.wait({self.engine.failure, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        for failure in (self.engine.failure, self.failed):
            if failure.done():
                failure.result()


def set_threads(actor: Actor) -> None:
    """One slot's share of the cores: oversubscribed threads cost up to 50×."""
    config = actor.config
    torch.set_num_threads(config.engine.threads or max((os.cpu_count() or 1) // config.slots.count, 1))


def _build_engine(actor: Actor, store: WeightStore, tokenizer: Tokenizer, version: int) -> Engine:
    config = actor.config
    device = choose_device(config.engine.device)
    policy = store.load_policy(version, dtype=choose_dtype(config.engine.dtype, device), device=device)
    training = config.drafter.train.enabled and config.engine.speculation.drafter == "eagle"
    chunk = config.hidden_states.chunk_tokens if training else None
    return Engine(policy, version, tokenizer, config.engine, feature_chunk=chunk)


def _completion(finished: Finished, reward: float, error: str | None, slot: int, attempt: int) -> Completion:
    request = finished.request
    return Completion(
        request_id=request.request_id,
        group_id=request.group_id,
        step=request.step,
        index=request.index,
        purpose=request.purpose,
        policy_version=request.policy_version,
        seed=request.seed,
        prompt=request.prompt,
        tokens=Array.of(finished.tokens),
        logprobs=Array.of(finished.logprobs, "float32"),
        policy_logprobs=Array.of(finished.policy_logprobs, "float32"),
        finish_reason=finished.reason,
        reward=reward,
        reward_error=error,
        draft=finished.draft,
        slot=slot,
        attempt=attempt,
        started_at=finished.started_at,
        finished_at=time.time(),
    )
