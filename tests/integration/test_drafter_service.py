"""The drafter trainer as a process of its own, with the test as scheduler, rollout and learner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.integration.conftest import wait_until
from tests.tiny import tiny_settings, write_tiny_policy
from tlt_pipeline import messages as m
from tlt_pipeline.blobs import FileBlobs, hidden_states_root
from tlt_pipeline.bus import Bus
from tlt_pipeline.bus.server import find_binary, start_redis
from tlt_pipeline.config import RedisConfig, RunConfig, dump_config, validate_config
from tlt_pipeline.drafter.shards import Document, write_shard
from tlt_pipeline.drafter.state import state_path
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.decoder import CausalAttention, Decoder, Ops, initialize
from tlt_pipeline.models.drafter import drafter_from_policy
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.rundir import RunDir, prepare_run_dir
from tlt_pipeline.weights import WeightStore

E = TypeVar("E", bound=m.WorkerEvent)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(find_binary(), RedisConfig(maxmemory_mb=128), tmp_path_factory.mktemp("redis")) as server:
        yield server.url


class Run:
    """A run whose learner and rollouts the test is: policy 0 is published, hidden states come from it."""

    def __init__(self, root: Path, config: RunConfig, bus: Bus) -> None:
        self.root, self.config, self.bus = root, config, bus
        self.weights = WeightStore.of_run(root, config)
        self.blobs = FileBlobs(hidden_states_root(config.hidden_states, RunDir(root)))
        self.policy: Decoder = load_decoder(config.policy.model)
        initialize(self.policy, torch.Generator().manual_seed(0), std=0.25)  # surer than the file's: to be learned
        self.seen: list[m.WorkerEvent] = []

    async def publish_policy(self) -> None:
        tokenizer = load_tokenizer(self.config.policy.model)
        published = self.weights.write_policy(0, self.policy, tokenizer, parent=-1, step=-1)
        await self.bus.broadcast(m.WEIGHTS, published, latest="policy")

    def shard(
        self, number: int, *, held_out: bool = False, answers: int = 12, tokens_alone: bool = False
    ) -> m.HiddenShard:
        """Sequences of a few fixed words, so that there is something to learn quickly."""
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(2, self.policy.config.vocab_size, (8, 6), generator=torch.Generator().manual_seed(0))
        documents = []
        for answer in range(answers):
            tokens = words[torch.randint(8, (6,), generator=generator)].view(1, -1)
            with torch.no_grad():
                hidden = self.policy.hidden(tokens, torch.arange(36)[None], Ops(CausalAttention()))[0]
            mask = (torch.arange(36) >= 6).to(torch.uint8)
            states = hidden[:, :0] if tokens_alone else hidden
            documents.append(Document(tokens[0].int(), states.bfloat16(), mask, 0, group=1000 * number + answer))
        blob = write_shard(self.blobs, documents, f"shard-{number}")
        return m.HiddenShard(
            shard_id=blob.name, blob=blob, slot=0, step=0, policy_version=0, documents=answers, tokens=36 * answers,
            held_out=held_out,
        )  # fmt: skip

    async def command(self, slot: int, *messages: m.Message) -> None:
        for message in messages:
            await self.bus.append(m.slot_commands(slot, "drafter-trainer"), message)

    async def grant(self, slot: int, lease: int, *shards: m.HiddenShard) -> None:
        await self.command(slot, m.LeaseGranted(slot=slot, holder="drafter", lease=lease))
        await self.command(slot, m.ShardsAssigned(slot=slot, lease=lease, shards=shards))

    async def recall(self, slot: int, lease: int) -> m.WorkerYielded:
        recall = m.LeaseRecalled(slot=slot, lease=lease, deadline_s=1.0, sent_at=time.time())
        await self.command(slot, recall)
        return await self.event(m.WorkerYielded, lease=lease, slot=slot)

    async def event(self, kind: type[E], timeout_s: float = 60.0, **facts) -> E:
        """The next event of this kind with these facts; the others are put aside."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in self.seen:
                    if isinstance(event, kind) and all(getattr(event, key) == value for key, value in facts.items()):
                        self.seen.remove(event)
                        return event
                deliveries = await self.bus.read(m.EVENTS, "scheduler", count=100, block_s=0.5)
                await self.bus.ack(deliveries)
                self.seen += [each.message for each in deliveries if isinstance(each.message, m.WorkerEvent)]

    async def drafter(self, version: int) -> m.WeightsPublished:
        """The newest drafter, once it is that version or a later one."""

        async def newest() -> m.AnyMessage | None:
            found = await self.bus.latest("drafter")
            return found if isinstance(found, m.WeightsPublished) and found.version >= version else None

        found = await wait_until(newest, timeout_s=60.0)
        assert isinstance(found, m.WeightsPublished)
        return found


class Process:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self._log = process, log

    def lines(self, event: str) -> list[dict]:
        found = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("event", "").startswith(event)]

    async def until(self, event: str) -> dict:
        return (await wait_until(lambda: self.lines(event), timeout_s=60.0))[-1]

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 30.0)


@asynccontextmanager
async def trainer(run: Run, slot: int, redis_url: str) -> AsyncIterator[Process]:
    log = run.root / "logs" / f"trainer-{slot}-{time.monotonic_ns()}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tlt_services.cli", "drafter-trainer"),
            *("--slot", str(slot), "--run-dir", str(run.root)),
            stderr=file,
            env={**os.environ, "REDIS_URL": redis_url},
        )
    try:
        yield Process(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def run_of(folder: Path, redis_url: str, **changes) -> AsyncIterator[Run]:
    settings = tiny_settings(write_tiny_policy(folder / "policy"), **{"engine__device": "cpu", **changes})
    settings["hidden_states"]["root"] = str(folder / "blobs")
    config = validate_config(settings)
    directory = prepare_run_dir(folder / "run", config.name)
    dump_config(config, directory.config)
    run_id = directory.run_id()
    bus = await Bus.connect(redis_url, run_id, config.limits, "scheduler")
    try:
        yield Run(directory.root, config, bus)
    finally:
        await bus.close()


async def test_a_lease_from_grant_to_yield(tmp_path: Path, redis_url: str) -> None:
    async with run_of(tmp_path, redis_url) as run, trainer(run, 0, redis_url) as process:
        await process.until("waiting for the learner's first policy version")
        await run.publish_policy()
        first = await run.drafter(1)
        assert (first.version, first.parent, first.policy_version) == (1, 0, 0)

        gone, torn = run.shard(90), run.shard(91)
        run.blobs.delete(gone.blob.name)
        (run.blobs.root / torn.blob.name).write_bytes(b"torn")
        await run.grant(0, 1, gone, run.shard(1), run.shard(2), run.shard(3, held_out=True), torn)
        better = await run.drafter(2)
        assert (better.parent, better.policy_version) == (1, 0)
        assert better.metrics["loss"] < better.metrics["published_loss"]
        assert better.metrics["acceptance_length"] > better.metrics["published_acceptance_length"]
        beat = await run.event(m.WorkerHeartbeat, drafter_version=better.version)  # while it trains
        assert beat.lease == 1 and beat.tokens_per_s > 0

        yielded = await run.recall(0, 1)
        assert yielded.reason == "recalled"
        assert yielded.seconds < 1.0
        assert yielded.tokens_trained > 0 and yielded.trained_s > 0
        line = await process.until("slot given back")
        assert line["shards"] == {"read": 3, "missing": 1, "corrupt": 1}
        assert line["began_after_s"] < 1.0
        await wait_until(state_path(RunDir(run.root).checkpoints, 0).is_file)

        newest = await run.drafter(better.version)
        drafter = run.weights.load_drafter(newest, run.policy.config)
        assert not torch.equal(drafter.fc.weight, drafter_from_policy(run.policy).fc.weight)
        heard = [each for _, each in await run.bus.listen(m.WEIGHTS, "0", block_s=0) if each.model == "drafter"]
        assert [each.version for each in heard] == list(range(1, len(heard) + 1))

        await run.grant(0, 2)  # nothing new: what the buffer has is enough
        while not (await run.event(m.WorkerHeartbeat, lease=2)).tokens_per_s:
            pass  # holds the lease, but has not trained yet
        assert (await run.recall(0, 2)).tokens_trained > 0
        await run.command(0, m.Shutdown(reason="done"))
        assert await process.exit_code() == 0
        assert await run.bus.depth(m.slot_commands(0, "drafter-trainer")) == 0


async def test_without_data_it_waits_and_is_back_at_once(tmp_path: Path, redis_url: str) -> None:
    async with run_of(tmp_path, redis_url) as run, trainer(run, 0, redis_url) as process:
        await run.publish_policy()
        await process.until("trainer ready")
        await run.grant(0, 1)
        await run.event(m.WorkerHeartbeat, lease=1)
        yielded = await run.recall(0, 1)
        assert (yielded.reason, yielded.tokens_trained) == ("no_data", 0)
        assert yielded.seconds < 1.0
        # no lease of that number: whoever waits for it is told so
        assert (await run.recall(0, 2)).reason == "no_data"
        # shards that come after the grant start the training
        await run.grant(0, 3)
        await run.command(0, m.ShardsAssigned(slot=0, lease=3, shards=(run.shard(1, answers=24),)))
        await wait_until(lambda: run.weights.versions("drafter")[-1] > 1, timeout_s=60.0)
        process.process.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 0
        assert (await run.event(m.WorkerYielded, lease=3)).reason == "stopped"


async def test_killed_in_a_lease_another_process_goes_on(tmp_path: Path, redis_url: str) -> None:
    # nothing is ever good enough to be published: what is learned is in the checkpoint alone
    async with run_of(tmp_path, redis_url, drafter__train__min_gain=10.0) as run:
        await run.publish_policy()
        async with trainer(run, 0, redis_url) as process:
            await process.until("trainer ready")
            await run.grant(0, 1, run.shard(1), run.shard(2, held_out=True))
            await process.until("drafter not published: not better")
            learned = await run.recall(0, 1)
            await wait_until(state_path(RunDir(run.root).checkpoints, 0).is_file)
            await run.grant(0, 2)
            await run.event(m.WorkerHeartbeat, lease=2)
            process.process.kill()
        async with trainer(run, 0, redis_url) as process:
            restored = await process.until("state restored")
            assert restored["tokens"] == learned.tokens_trained and restored["parent"] == 1
            await process.until("trainer ready")
            await run.grant(0, 3, run.shard(1), run.shard(2, held_out=True))
            line = await process.until("drafter not published: not better")
            assert line["loss"] < line["published_loss"]
            assert (await run.recall(0, 3)).tokens_trained > 0
            await run.command(0, m.Shutdown(reason="done"))
            assert await process.exit_code() == 0
        assert run.weights.versions("drafter") == [1]


async def test_states_are_recomputed_by_a_policy_that_may_be_gone(tmp_path: Path, redis_url: str) -> None:
    async with run_of(tmp_path, redis_url) as run, trainer(run, 0, redis_url) as process:
        await run.publish_policy()
        await process.until("trainer ready")
        shards = [run.shard(number, held_out=number == 3, tokens_alone=True) for number in (1, 2, 3)]
        pruned = run.shard(4, tokens_alone=True).model_copy(update={"policy_version": 1})
        await run.grant(0, 1, *shards, pruned)
        better = await run.drafter(2)
        assert better.metrics["loss"] < better.metrics["published_loss"]
        assert (await run.recall(0, 1)).tokens_trained > 0
        assert (await process.until("slot given back"))["shards"] == {"read": 3, "policy_missing": 1}
        await run.command(0, m.Shutdown(reason="done"))
        assert await process.exit_code() == 0


async def test_training_that_brings_nothing_stops_by_itself_and_rests(tmp_path: Path, redis_url: str) -> None:
    settings = {"drafter__train__min_gain": 10.0, "drafter__train__budget": {"patience_s": 0.5}}
    async with run_of(tmp_path, redis_url, **settings) as run, trainer(run, 0, redis_url) as process:
        await run.publish_policy()
        await run.grant(0, 1, run.shard(1), run.shard(2, held_out=True))
        stopped = await run.event(m.WorkerYielded, lease=1)
        assert stopped.reason == "budget_no_gain" and stopped.tokens_trained > 0
        assert stopped.counts["drafter_refused_not_better"] >= 1
        await run.grant(0, 2, run.shard(1), run.shard(2, held_out=True))
        rests = await run.event(m.WorkerYielded, lease=2)
        assert (rests.reason, rests.tokens_trained) == ("budget_resting", 0)
        await run.grant(0, 3)  # a try
        tried = await run.event(m.WorkerYielded, lease=3)
        assert tried.reason == "budget_no_gain" and tried.tokens_trained > 0
        await run.command(0, m.Shutdown(reason="done"))
        assert await process.exit_code() == 0


async def test_slots_follow_each_others_versions(tmp_path: Path, redis_url: str) -> None:
    async with run_of(tmp_path, redis_url) as run:
        await run.publish_policy()
        async with trainer(run, 1, redis_url) as second:
            await second.until("waiting for the first drafter version (is drafter-trainer --slot 0 running?)")
            async with trainer(run, 0, redis_url) as first:
                await run.grant(0, 1, run.shard(1), run.shard(2), run.shard(3, held_out=True))
                await run.drafter(2)
                await run.recall(0, 1)
                await run.command(0, m.Shutdown(reason="done"))
                assert await first.exit_code() == 0
            published = await run.drafter(2)
            await run.event(m.WorkerHeartbeat, slot=1, drafter_version=published.version)
            await run.grant(1, 1, run.shard(4), run.shard(5), run.shard(6, held_out=True))
            following = await run.drafter(published.version + 1)
            assert following.parent >= published.version
            await run.recall(1, 1)
            await run.command(1, m.Shutdown(reason="done"))
            assert await second.exit_code() == 0


async def test_a_slot_recalled_early_counts_and_a_worse_version_is_taken_back(tmp_path: Path, redis_url: str) -> None:
    """Slot 1 is recalled before it looked at what it has learned; slot 0 finds that, and merges it with its own."""
    async with run_of(tmp_path, redis_url, drafter__train__publish_every_s=2.0) as run:
        await run.publish_policy()
        held_out = run.shard(9, held_out=True)
        async with trainer(run, 0, redis_url) as first, trainer(run, 1, redis_url) as second:
            await first.until("trainer ready")
            await second.until("trainer ready")
            await run.grant(1, 1, run.shard(1), run.shard(2), held_out)
            while not (await run.event(m.WorkerHeartbeat, slot=1, lease=1)).tokens_per_s:
                pass
            early = await run.recall(1, 1)
            assert early.tokens_trained > 0 and run.weights.versions("drafter") == [1]
            await wait_until(state_path(RunDir(run.root).checkpoints, 1).is_file)

            await run.grant(0, 1, run.shard(3), run.shard(4), held_out)
            published = await run.drafter(2)
            yielded = await run.recall(0, 1)
            assert yielded.counts["drafter_merge_tried"] >= 1
            if "merged" in published.metrics:
                assert published.metrics["tokens_trained"] >= early.tokens_trained

            newest = run.weights.versions("drafter")[-1]
            await run.command(0, m.DrafterRolledBack(slot=0, version=newest, to=1))
            again = await run.drafter(newest + 1)
            assert (again.version, again.parent) == (newest + 1, 1)
            assert again.metrics["rolled_back_from"] == newest
            weights = [run.weights.load_drafter(each, run.policy.config) for each in (1, again)]
            assert torch.equal(weights[0].fc.weight, weights[1].fc.weight)
            for slot, process in enumerate((first, second)):  # both go on from there
                await run.event(m.WorkerHeartbeat, slot=slot, drafter_version=again.version)
                await run.command(slot, m.Shutdown(reason="done"))
                assert await process.exit_code() == 0
