"""Rollout tokens/s side by side in one run: vLLM and the native engine, without speculation and with the same drafter.

    .venv-vllm/bin/python tests/vllm/throughput.py POLICY DRAFTER --config configs/smollm2-135m.yaml [--json FILE]

All engines answer the same prompts as a rollout does: drawn at the config's temperature, ended by their stop tokens,
`batch` at a time, one that ends makes room for the next. They take turns, round after round, on the same number of
threads, number format and OpenMP library (Intel's, the fastest for both); the first round teaches those that adapt and
doesn't count, of the others the median does. The time is that of everything: prompts, decoding, choosing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from tlt_pipeline.config import RunConfig, load_config
from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.messages import RolloutRequest
from tlt_pipeline.models.checkpoint import load_decoder, load_drafter
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.scheduling.events import SubmitStep
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.weights import WeightStore
from tlt_services.step_requests import RequestWriter

BATCHES = (1, 4, 16)
ANSWERS = {1: 4, 4: 12, 16: 32}
"""Of a turn, by batch size: some seconds."""
Answering = Callable[[list[RolloutRequest], int], Awaitable[list[Finished]]]


@dataclass
class Arm:
    """One engine with one setting. `speeds`: tokens/s of the rounds that count, by batch size."""

    name: str
    answer: Answering
    speeds: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    acceptance: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    async def take_turn(self, requests: list[RolloutRequest], batch: int, *, counts: bool) -> None:
        began = time.perf_counter()
        done = await self.answer(requests, batch)
        seconds = time.perf_counter() - began
        tokens = sum(len(answer.tokens) for answer in done)
        if counts:
            steps = sum(answer.draft.decode_steps for answer in done)
            self.speeds.setdefault(batch, []).append(tokens / seconds)
            self.acceptance.setdefault(batch, []).append(tokens / max(steps, 1))


class Native:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def answer(self, requests: list[RolloutRequest], batch: int) -> list[Finished]:
        pending, finished = deque(requests), list[Finished]()
        with torch.inference_mode():
            while pending or self.engine.running or self.engine.waiting:
                while pending and self.engine.running + len(self.engine.waiting) < batch:
                    self.engine.submit(pending.popleft())
                finished += self.engine.step()
        return finished


class Vllm:
    engine: Any = None

    def __init__(self) -> None:
        self.finished: list[Finished] = []
        self.came = asyncio.Event()

    def take(self, output: Any) -> None:
        assert not output.refused, output.refused
        self.finished += output.finished
        self.came.set()

    async def answer(self, requests: list[RolloutRequest], batch: int) -> list[Finished]:
        pending, self.finished = deque(requests), []
        while len(self.finished) < len(requests):
            room = batch - self.engine.running
            self.engine.submit([pending.popleft() for _ in range(min(room, len(pending)))])
            self.came.clear()
            came = asyncio.ensure_future(self.came.wait())
            await asyncio.wait({came, self.engine.failure}, return_when=asyncio.FIRST_COMPLETED)
            if self.engine.failure.done():
                self.engine.failure.result()
        return self.finished


def with_engine(config: RunConfig, exact: bool = True, **speculation: Any) -> RunConfig:
    adapted = config.engine.speculation.model_copy(update=speculation)
    engine: dict[str, Any] = {"max_batch": max(BATCHES), "speculation": adapted}
    if not exact:
        engine["exact"] = "off"
    return config.model_copy(update={"engine": config.engine.model_copy(update=engine)})


class Contest:
    def __init__(self, config: RunConfig, policy: Path, drafter: Path, scratch: Path) -> None:
        self.config, self.scratch = config, scratch
        self.dtype = choose_dtype(config.engine.dtype, choose_device(config.engine.device))
        self.tokenizer, self.policy = load_tokenizer(policy), load_decoder(policy, self.dtype)
        self.drafter = load_drafter(drafter, self.policy.config, self.dtype)
        self.store = WeightStore(scratch / "weights", 10)
        self.store.write_policy(1, self.policy, self.tokenizer, parent=0, step=0)
        self.published = self.store.write_drafter(1, self.drafter, parent=0, policy_version=1, step=0)
        self.engines: list[Any] = []
        self.arms: list[Arm] = []

    def add_native(self, name: str, config: RunConfig) -> None:
        window = config.drafter.context_window
        engine = Engine(self.policy, 1, self.tokenizer, config.engine, context_window=window)
        if config.engine.speculation.drafter != "off":
            engine.set_drafter(self.drafter, 1)
        self.arms.append(Arm(name, Native(engine).answer))

    async def add_vllm(self, name: str, config: RunConfig) -> None:
        from tlt_pipeline.engine.vllm_engine import VllmEngine

        player = Vllm()
        scratch = self.scratch / name.replace(" ", "-")
        player.engine = await VllmEngine.start(config, self.store, self.tokenizer, 1, player.take, scratch)
        self.engines.append(player.engine)
        if config.engine.speculation.drafter != "off":
            await player.engine.load_drafter(self.store, self.published)
        self.arms.append(Arm(name, player.answer))

    async def start(self) -> None:
        native, vllm = self.config, self.config.model_copy(deep=True)
        vllm = vllm.model_copy(update={"engine": vllm.engine.model_copy(update={"type": "vllm"})})
        await self.add_vllm("vllm off", with_engine(vllm, drafter="off"))
        await self.add_vllm("vllm fixed", with_engine(vllm, choice="fixed"))
        await self.add_vllm("vllm steered", with_engine(vllm, choice="goodput"))
        self.add_native("native off_plain", with_engine(native, exact=False, drafter="off"))
        self.add_native("native off", with_engine(native, drafter="off"))
        self.add_native("native adaptive", with_engine(native, choice="goodput"))

    async def play(self, rounds: int) -> None:
        writer = RequestWriter(self.config, TaskMix(self.config.task, self.config.seed), self.tokenizer)
        for number in range(rounds + 1):
            for batch in BATCHES:
                count = ANSWERS[batch]
                step = number * len(BATCHES) + BATCHES.index(batch)
                order = SubmitStep(step=step, purpose="train", prompts=count, group_size=1, policy_version=1)
                requests = writer.write(order)
                for place in range(len(self.arms)):
                    arm = self.arms[(place + number) % len(self.arms)]
                    await arm.take_turn(requests, batch, counts=number > 0)
            typer.echo(f"round {number} of {rounds}", err=True)

    def report(self) -> dict[str, Any]:
        speeds = {arm.name: {batch: round(median(arm.speeds[batch]), 1) for batch in BATCHES} for arm in self.arms}
        acceptance = {
            arm.name: {batch: round(median(arm.acceptance[batch]), 2) for batch in BATCHES} for arm in self.arms
        }
        best = {batch: max(speeds[name][batch] for name in speeds if name.startswith("vllm")) for batch in BATCHES}
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "tokens_per_s": speeds,
            "tokens_a_step": acceptance,
            "off_over_vllm_off": {b: round(speeds["native off"][b] / speeds["vllm off"][b], 2) for b in BATCHES},
            "adaptive_over_best_vllm": {b: round(speeds["native adaptive"][b] / best[b], 2) for b in BATCHES},
        }

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


async def measure(config: RunConfig, policy: Path, drafter: Path, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        contest = Contest(config, policy, drafter, Path(scratch))
        try:
            await contest.start()
            await contest.play(rounds)
            return contest.report()
        finally:
            await contest.close()


def main(
    policy: Path,
    drafter: Path,
    config: Path = Path("configs/smollm2-135m.yaml"),
    rounds: int = 3,
    threads: int = 2,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    torch.set_num_threads(threads)
    overrides = [f"engine.threads={threads}", "engine.vllm.kv_cache_gb=0.5", "hidden_states.source=recompute"]
    report = asyncio.run(measure(load_config(config, overrides), policy, drafter, rounds))
    header = "".join(f"{f'batch {batch}':>16}" for batch in BATCHES)
    typer.echo(f"{'tokens/s (tokens a step)':<26}{header}")
    for name, speeds in report["tokens_per_s"].items():
        cells = (f"{speeds[batch]:.1f} ({report['tokens_a_step'][name][batch]:.2f})" for batch in BATCHES)
        typer.echo(f"{name:<26}" + "".join(f"{cell:>16}" for cell in cells))
    for name in ("off_over_vllm_off", "adaptive_over_best_vllm"):
        typer.echo(f"{name:<26}" + "".join(f"{report[name][batch]:>16}" for batch in BATCHES))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file() and not os.environ.get("LD_PRELOAD"):  # must be there before the interpreter starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(openmp)})
    typer.run(main)
