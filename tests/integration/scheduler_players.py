"""The other processes of a run, played over a real bus: they answer at once and remember what they were told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.tiny import ALPHABET, tiny_settings
from tlt_pipeline import messages as m
from tlt_pipeline.blobs import open_hidden_states
from tlt_pipeline.bus import Bus, Delivery
from tlt_pipeline.config import RunConfig, dump_config, validate_config
from tlt_pipeline.models.tokenizer import character_tokenizer
from tlt_pipeline.rundir import RunDir, prepare_run_dir


def prepare(folder: Path, **changes: Any) -> tuple[RunDir, RunConfig]:
    """A run directory as the launcher and the learner leave it: all that the scheduler reads of a policy is its
    tokenizer."""
    shards = {"hidden_states__root": str(folder / "shards")}
    config = validate_config(tiny_settings(Path("unused"), **shards, **changes))
    run = prepare_run_dir(folder / "run", config.name)
    dump_config(config, run.config)
    policy = run.weights / "policy/v000000"
    policy.mkdir(parents=True, exist_ok=True)
    character_tokenizer(ALPHABET).save(policy)
    return run, config


class SchedulerProcess:
    """`tlt scheduler`; `lines` are its log so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def exit_code(self, timeout_s: float = 90.0) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@asynccontextmanager
async def scheduler(run: RunDir, url: str) -> AsyncIterator[SchedulerProcess]:
    command = (sys.executable, "-m", "tlt_services.cli", "scheduler", "--run-dir", str(run.root))
    with run.log("scheduler").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "REDIS_URL": url}, stdout=log, stderr=log
        )
    try:
        yield SchedulerProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def log_lines(run: RunDir) -> list[dict[str, Any]]:
    lines = run.log("scheduler").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


class Players:
    """Rollout workers, drafter trainers and the learner of a run. `answered` counts completions by request."""

    def __init__(self, url: str, run: RunDir, config: RunConfig, version: int = 0) -> None:
        self.url, self.run, self.config = url, run, config
        self.version = version
        self.requests: dict[str, m.RolloutRequest] = {}
        self.trained: Counter[str] = Counter()
        self.orders: list[m.TrainStep] = []
        self.shards: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.blobs = open_hidden_states(config.hidden_states, run, url)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        slots = range(self.config.slots.count)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.learn())]
            tasks += [group.create_task(self.roll_out(slot)) for slot in slots]
            tasks += [group.create_task(self.train(slot)) for slot in slots]
            yield
            for task in tasks:
                task.cancel()

    async def connect(self, name: str) -> Bus:
        return await Bus.connect(self.url, self.run.run_id(), self.config.limits, name)

    @staticmethod
    def stamp(name: str, slot: int) -> dict[str, Any]:
        return {"worker": name, "slot": slot, "at": time.time()}

    async def roll_out(self, slot: int) -> None:
        bus, name = await self.connect(f"rollout-{slot}"), f"rollout-{slot}"
        stream = m.slot_commands(slot, "rollout")
        await bus.append(m.EVENTS, m.WorkerStarted(role="rollout", **self.stamp(name, slot)))
        try:
            while True:
                for delivery in await bus.read(stream, "worker", count=1, block_s=1.0):
                    await bus.ack([delivery])
                    if isinstance(delivery.message, m.Shutdown):
                        self.ended[name] += 1
                        return
                    assert isinstance(delivery.message, m.LeaseGranted)
                    while found := await bus.read(m.REQUESTS, "rollout", count=1, block_s=0.02):
                        await self.answer(bus, found[0], slot)
                    lease = delivery.message.lease
                    await bus.append(m.EVENTS, m.WorkerIdle(lease=lease, **self.stamp(name, slot)))
        finally:
            await bus.close()

    async def answer(self, bus: Bus, delivery: Delivery, slot: int) -> None:
        request = delivery.message
        assert isinstance(request, m.RolloutRequest) and request.policy_version <= self.version
        self.requests[request.request_id] = request
        is_long = request.request_id.endswith("p001-01")
        await asyncio.sleep(0.5 if is_long else 0.01)  # the tail in which the other slot is idle
        tokens = list(range(5 + request.index))
        facts = request.model_dump(include={"request_id", "group_id", "step", "index", "purpose", "seed"})
        completion = m.Completion(
            **facts,
            policy_version=request.policy_version,
            prompt=request.prompt,
            tokens=m.Array.of(tokens),
            logprobs=m.Array.of([-0.5] * len(tokens), "float32"),
            policy_logprobs=m.Array.of([-0.5] * len(tokens), "float32"),
            finish_reason="stop",
            reward=float(request.index % 2),
            claim="exact",
            draft=m.DraftStats(drafts=2, drafted=8, accepted=request.step + 1),
            slot=slot,
            attempt=delivery.attempt,
            started_at=0.0,
            finished_at=0.0,
        )
        await self.stream_shard(bus, request, slot)
        assert await bus.complete(delivery, m.COMPLETIONS, completion)

    async def stream_shard(self, bus: Bus, request: m.RolloutRequest, slot: int) -> None:
        blob = self.blobs.write(f"{request.request_id}.safetensors", b"x" * 100)
        facts = {"documents": 1, "tokens": 9, "held_out": request.index == 0, "slot": slot}
        shard = m.HiddenShard(
            shard_id=request.request_id,
            blob=blob,
            step=request.step,
            policy_version=request.policy_version,
            **facts,
        )
        await bus.append(m.HIDDEN_STATES, shard)

    async def train(self, slot: int) -> None:
        name = f"drafter-trainer-{slot}"
        bus, stream = await self.connect(name), m.slot_commands(slot, "drafter-trainer")
        await bus.append(m.EVENTS, m.WorkerStarted(role="drafter-trainer", **self.stamp(name, slot)))
        since = 0.0
        try:
            while True:
                for delivery in await bus.read(stream, "worker", count=10, block_s=1.0):
                    await bus.ack([delivery])
                    match delivery.message:
                        case m.LeaseGranted():
                            since = time.time()
                        case m.ShardsAssigned(shards=shards):
                            self.shards |= {shard.shard_id for shard in shards}
                        case m.LeaseRecalled(lease=lease):
                            facts = {"trained_s": time.time() - since, "tokens_trained": 9, "seconds": 0.0}
                            gone = m.WorkerYielded(lease=lease, reason="recalled", **facts, **self.stamp(name, slot))
                            await bus.append(m.EVENTS, gone)
                        case _:
                            self.ended[name] += 1
                            return
        finally:
            await bus.close()

    async def learn(self) -> None:
        bus = await self.connect("learner")
        await bus.append(m.EVENTS, m.WorkerStarted(role="learner", **self.stamp("learner", -1)))
        await self.publish(bus, "policy", self.version)
        try:
            while True:
                await bus.ack(await bus.read(m.COMPLETIONS, "learner", count=100, block_s=0.0))
                for delivery in await bus.read(m.LEARNER_COMMANDS, "learner", count=1, block_s=0.2):
                    if isinstance(delivery.message, m.Shutdown):
                        self.ended["learner"] += 1
                        await bus.ack([delivery])
                        return
                    assert isinstance(delivery.message, m.TrainStep)
                    await self.train_step(bus, delivery.message)
                    await bus.ack([delivery])
        finally:
            await bus.close()

    async def train_step(self, bus: Bus, order: m.TrainStep) -> None:
        assert order.step == order.policy_version == self.version
        self.orders.append(order)
        self.trained.update(order.request_ids)
        await asyncio.sleep(0.05)
        self.version = order.step + 1
        await self.publish(bus, "policy", self.version)
        await self.publish(bus, "drafter", self.version)
        facts = {"trained": len(order.request_ids), "learner_s": 0.05, "metrics": {"loss": 0.5}}
        done = m.StepTrained(step=order.step, policy_version=self.version, **facts, **self.stamp("learner", -1))
        await bus.append(m.EVENTS, done)

    async def publish(self, bus: Bus, model: Any, version: int) -> None:
        # The tokenizer is the same in every version; the run has one folder of it.
        facts = {"parent": 0, "step": 0, "path": "policy/v000000", "size": 1, "sha256": ""}
        published = m.WeightsPublished(model=model, version=version, policy_version=version, **facts)
        await bus.broadcast(m.WEIGHTS, published, latest=model)
