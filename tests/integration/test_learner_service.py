"""The learner as a process of its own, with the test as scheduler and rollout: each step is trained exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import wait_until
from tests.tiny import tiny_settings, write_tiny_policy
from tests.unit.learner_cases import assert_same_bits, make_completions
from tlt_pipeline import messages as m
from tlt_pipeline.bus import Bus
from tlt_pipeline.bus.server import find_binary, start_redis
from tlt_pipeline.config import RedisConfig, RunConfig, dump_config, validate_config
from tlt_pipeline.learner.trainer import Trainer
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.rundir import prepare_run_dir
from tlt_pipeline.weights import WeightStore

SCHEDULER = "scheduler"


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(find_binary(), RedisConfig(maxmemory_mb=128), tmp_path_factory.mktemp("redis")) as server:
        yield server.url


def prepare(folder: Path, **changes) -> tuple[Path, RunConfig]:
    """A run directory for the learner. A micro-batch a completion: steps that last long enough to be killed in."""
    policy = write_tiny_policy(folder / "policy")
    fixed = {"learner__tokens_per_microbatch": 1, "learner__device": "cpu"}
    config = validate_config(tiny_settings(policy, **{**fixed, **changes}))
    run = prepare_run_dir(folder / "run", config.name)
    dump_config(config, run.config)
    return run.root, config


class Learner:
    """The process; `lines` are its log so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict] = []

    async def until(self, event: str, timeout_s: float = 100.0) -> dict:
        """The next log line whose event matches that pattern."""
        assert self.process.stderr is not None
        async with asyncio.timeout(timeout_s):
            while raw := await self.process.stderr.readline():
                try:
                    line = json.loads(raw)
                except json.JSONDecodeError:
                    line = {"event": raw.decode().strip()}
                self.lines.append(line)
                if re.fullmatch(event, line.get("event", "")):
                    return line
        raise AssertionError(f"ended without {event!r}: {self.lines[-5:]}")

    async def exit_code(self, timeout_s: float = 30.0) -> int:
        _, left = await asyncio.wait_for(self.process.communicate(), timeout_s)
        self.lines += [json.loads(line) for line in left.splitlines() if line.startswith(b"{")]
        return await self.process.wait()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def learner(run_dir: Path, redis_url: str) -> AsyncIterator[Learner]:
    command = (sys.executable, "-m", "tlt_services.cli", "learner", "--run-dir", str(run_dir))
    process = await asyncio.create_subprocess_exec(
        *command,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"},
        limit=1 << 20,
    )
    try:
        yield Learner(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def scheduler(run_dir: Path, config: RunConfig, redis_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(redis_url, (run_dir / "run_id").read_text().strip(), config.limits, SCHEDULER)
    try:
        yield bus
    finally:
        await bus.close()


def answers_of(step: int, count: int = 6, **facts) -> list[m.Completion]:
    """Random answers of step `step`: `count` groups of four."""
    found = []
    for completion in make_completions(groups=count, seed=step, step=step, policy_version=step):
        request = completion.request_id.replace("s00000", f"s{step:05d}")
        group = completion.group_id.replace("s00000", f"s{step:05d}")
        found.append(completion.model_copy(update={"request_id": request, "group_id": group, **facts}))
    return found


def order_for(step: int, completions: list[m.Completion]) -> m.TrainStep:
    return m.TrainStep(step=step, policy_version=step, request_ids=tuple(each.request_id for each in completions))


async def send(bus: Bus, completions: list[m.Completion]) -> None:
    for completion in completions:
        await bus.append(m.COMPLETIONS, completion)


async def read_event(bus: Bus, kind: type[m.WorkerEvent], timeout_s: float = 100.0):
    async with asyncio.timeout(timeout_s):
        while True:
            for delivery in await bus.read(m.EVENTS, SCHEDULER, count=1, block_s=1):
                await bus.ack([delivery])
                if isinstance(delivery.message, kind):
                    return delivery.message


async def drain_completions(bus: Bus) -> None:
    """What the scheduler's group has to do before entries go."""
    while found := await bus.read(m.COMPLETIONS, SCHEDULER, count=500, block_s=0):
        await bus.ack(found)


async def is_empty(bus: Bus) -> bool:
    return not (await bus.depth(m.COMPLETIONS) or await bus.depth(m.LEARNER_COMMANDS))


def train_here(config: RunConfig, policy: Path, steps: list[list[m.Completion]]) -> Trainer:
    """The same steps without processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = Trainer(config.learner, load_decoder(policy), config.seed, temperature=config.rollout.temperature)
    for completions in steps:
        trainer.train_step(completions)
    torch.set_num_threads(before)
    return trainer


async def test_one_step_and_the_end(tmp_path: Path, redis_url: str) -> None:
    run_dir, config = prepare(tmp_path)
    completions = answers_of(0)
    async with scheduler(run_dir, config, redis_url) as bus, learner(run_dir, redis_url) as process:
        await send(bus, completions[:10])
        await send(bus, [completions[3]])  # a duplicate
        await send(bus, [completions[0].model_copy(update={"request_id": "e00000-p000-00", "purpose": "eval"})])
        await bus.append(m.LEARNER_COMMANDS, order_for(0, completions))
        first = await read_event(bus, m.WorkerStarted)
        assert (first.role, first.slot) == ("learner", -1)
        await process.until(r"waiting for \d+ completions of step 0 \(rollout workers\)")
        published = await bus.latest("policy")
        assert (published.version, published.step) == (0, -1)
        await send(bus, completions[10:])
        trained = await read_event(bus, m.StepTrained)
        assert (trained.step, trained.policy_version, trained.trained) == (0, 1, len(completions))
        assert {"loss", "grad_norm", "entropy", "reward_mean", "zero_variance_groups"} <= trained.metrics.keys()
        published = await bus.latest("policy")
        assert (published.version, published.parent, published.step) == (1, 0, 0)
        heard = [message.version for _, message in await bus.listen(m.WEIGHTS, "0", block_s=0)]
        assert heard == [0, 1]
        await drain_completions(bus)
        await bus.append(m.LEARNER_COMMANDS, m.Shutdown(reason="done"))
        assert await process.exit_code() == 0
        assert await bus.depth(m.COMPLETIONS) == 0
        assert await bus.depth(m.LEARNER_COMMANDS) == 0
    loaded = WeightStore(run_dir / "weights", 10).load_policy(published)
    expected = train_here(config, tmp_path / "policy", [completions])
    assert_same_bits(dict(loaded.named_parameters()), dict(expected.policy.named_parameters()))


async def test_killed_anywhere_each_step_is_trained_once(tmp_path: Path, redis_url: str) -> None:
    run_dir, config = prepare(tmp_path)
    steps = [answers_of(step, 12) for step in range(2)]
    trained = []
    async with scheduler(run_dir, config, redis_url) as bus:

        async def give(step: int) -> None:
            await send(bus, steps[step])
            await bus.append(m.LEARNER_COMMANDS, order_for(step, steps[step]))

        await give(0)
        async with learner(run_dir, redis_url) as process:
            await process.until("training")
            await process.kill()
        assert WeightStore(run_dir / "weights", 10).versions("policy") == [0]
        async with learner(run_dir, redis_url) as process:
            trained.append(await read_event(bus, m.StepTrained))
            await give(1)
            await wait_until((run_dir / "weights" / "policy" / "v000002").exists, 100)  # reported or not
            await process.kill()
        async with learner(run_dir, redis_url):
            trained.append(await read_event(bus, m.StepTrained))
            await drain_completions(bus)
            await wait_until(lambda: is_empty(bus), 30)
    assert [(event.step, event.trained, event.policy_version) for event in trained] == [(0, 48, 1), (1, 48, 2)]
    store = WeightStore(run_dir / "weights", 10)
    assert store.versions("policy") == [0, 1, 2]
    expected = train_here(config, tmp_path / "policy", steps)
    assert_same_bits(dict(store.load_policy(2).named_parameters()), dict(expected.policy.named_parameters()))


async def test_asked_to_stop_in_mid_step_it_leaves_the_step_for_later(tmp_path: Path, redis_url: str) -> None:
    run_dir, config = prepare(tmp_path)
    completions = answers_of(0, 20)
    async with scheduler(run_dir, config, redis_url) as bus:
        await send(bus, completions)
        await bus.append(m.LEARNER_COMMANDS, order_for(0, completions))
        async with learner(run_dir, redis_url) as process:
            await process.until("training")
            process.process.send_signal(signal.SIGINT)
            assert await process.exit_code() == 0
        assert WeightStore(run_dir / "weights", 10).versions("policy") == [0]
        assert (run_dir / "checkpoints" / "learner" / "v000000.safetensors").is_file()
        assert await bus.depth(m.LEARNER_COMMANDS) == 1


async def test_too_old_answers_are_refused_and_divergence_ends_the_run(tmp_path: Path, redis_url: str) -> None:
    run_dir, config = prepare(tmp_path, learner__normalize_std=False)
    completions, diverging = answers_of(0), answers_of(1)
    completions[0] = completions[0].model_copy(update={"policy_version": -1})
    diverging[0] = diverging[0].model_copy(update={"reward": 1e38})
    async with scheduler(run_dir, config, redis_url) as bus, learner(run_dir, redis_url) as process:
        await send(bus, [*completions, *diverging])
        await bus.append(m.LEARNER_COMMANDS, order_for(0, completions))
        trained = await read_event(bus, m.StepTrained)
        assert (trained.trained, trained.metrics["stale"]) == (len(completions) - 1, 1.0)
        letters = await bus.read(m.DEAD_LETTERS, SCHEDULER, count=10, block_s=5)
        (letter,) = [delivery.message for delivery in letters]
        assert letter.request_id == completions[0].request_id
        assert "too old for step 0" in letter.reason
        await bus.append(m.LEARNER_COMMANDS, order_for(1, diverging))
        failed = await read_event(bus, m.RunFailed)
        assert "step 1 gave loss" in failed.reason
        assert "the last good policy is policy/v000001" in failed.reason
        assert "lower learner.lr" in failed.reason
        assert await process.exit_code() in (1, 3)
    assert WeightStore(run_dir / "weights", 10).versions("policy") == [0, 1]
    assert (run_dir / "checkpoints" / "learner" / "v000001.safetensors").is_file()


async def test_a_step_goes_on_without_completions_that_cannot_be_read(tmp_path: Path, redis_url: str) -> None:
    run_dir, config = prepare(tmp_path, limits__worker_timeout_s=2.0)
    completions = answers_of(0)
    async with scheduler(run_dir, config, redis_url) as bus, learner(run_dir, redis_url) as process:
        await send(bus, completions[2:])
        await bus.append(m.LEARNER_COMMANDS, order_for(0, completions))
        trained = await read_event(bus, m.StepTrained)
        assert trained.trained == len(completions) - 2
        lost = await process.until("completions lost, training without them")
        assert lost["lost"] == [each.request_id for each in completions[:2]]


async def test_missing_model_is_one_line(tmp_path: Path, redis_url: str) -> None:
    run_dir, config = prepare(tmp_path)
    dump_config(
        config.model_copy(update={"policy": config.policy.model_copy(update={"model": "nowhere"})}),
        run_dir / "config.yaml",
    )
    async with scheduler(run_dir, config, redis_url) as bus, learner(run_dir, redis_url) as process:
        failed = await read_event(bus, m.RunFailed)
        assert "nowhere" in failed.reason
        assert "\n" not in failed.reason
        assert await process.exit_code() == 2
