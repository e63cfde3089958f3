"""`tlt bench spot CONFIG`: what the spot trainer's parts save or cost, each as a ratio within one run.

- packing: how full rows are, and tokens trained a second against the same documents padded to the longest;
- checkpoint: for how long training stops, against a full synchronous save;
- loss memory: the chunked loss against the plain one (bench_spot_loss.py, in processes of their own);
- streaming: how much slower the rollout is where its hidden states are streamed.

Consumes: a config. Publishes: a table and (`--json`) a report. Everything is measured on answers that the config's
policy writes to the config's prompts. Turns that are compared alternate; of each kind the quickest counts, the others
were held up by something else. Shapes as in drafter/batching.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from tlt_pipeline.blobs import BlobStore, FileBlobs
from tlt_pipeline.config import RunConfig, SpeculationConfig, load_config
from tlt_pipeline.drafter.batching import Batch, DocumentAttention, cut, pack
from tlt_pipeline.drafter.losses import FrozenParts, feature_loss, soft_cross_entropy
from tlt_pipeline.drafter.shards import Document, read_shard
from tlt_pipeline.drafter.state import StateKeeper
from tlt_pipeline.drafter.streaming import ShardStream
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.loop import EngineLoop
from tlt_pipeline.engine.rollout_engine import Output
from tlt_pipeline.messages import HiddenShard, RolloutRequest
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.decoder import Attend, CausalAttention, Ops
from tlt_pipeline.models.drafter import drafter_from_policy
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.locate import locate_model
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.scheduling.events import SubmitStep
from tlt_pipeline.tasks.mix import TaskMix
from tlt_services.bench_options import check_writable
from tlt_services.bench_spot_loss import measure_loss_memory
from tlt_services.step_requests import RequestWriter

ROUNDS = 5
BATCHES = 16
"""Training batches a round."""


def main(config_file: Path, overrides: list[str], json_path: Path | None) -> int:
    """Raises ConfigError, ModelError."""
    check_writable(json_path, "--json")
    config = load_config(config_file, overrides)
    torch.set_num_threads(config.engine.threads or 1)
    engine, requests = _open(config)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
        streaming = Streaming(engine, requests, config, FileBlobs(Path(folder) / "blobs"))
        report["streaming"] = asyncio.run(streaming.measure())
        trainer = _trainer(engine, config, streaming.documents())
        report["packing"] = measure_packing(trainer)
        report["checkpoint"] = asyncio.run(measure_checkpoint(trainer, Path(folder)))
    report["loss_memory"] = measure_loss_memory(torch.get_num_threads())
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    _show(report)
    return 0


def _open(config: RunConfig) -> tuple[Engine, list[RolloutRequest]]:
    """An engine as a rollout worker has it, but without speculation: a drafter that nobody trained would slow it down,
    and streaming's share with it. And a step's requests."""
    folder = locate_model(config.policy.model)
    device = choose_device(config.engine.device)
    policy = load_decoder(folder, choose_dtype(config.engine.dtype, device), device)
    tokenizer = load_tokenizer(folder)
    settings = config.engine.model_copy(update={"speculation": SpeculationConfig(drafter="off")})
    chunk = config.hidden_states.chunk_tokens
    engine = Engine(policy, 0, tokenizer, settings, feature_chunk=chunk, context_window=config.drafter.context_window)
    order = SubmitStep(0, 0, "train", config.rollout.prompts_per_step, config.rollout.group_size)
    return engine, RequestWriter(config, TaskMix(config.task, config.seed), tokenizer).write(order)


def _trainer(engine: Engine, config: RunConfig, documents: list[Document]) -> DrafterTrainer:
    device = choose_device(config.engine.device)
    drafter = drafter_from_policy(engine.policy)
    trainer = DrafterTrainer(config, drafter, 1, FrozenParts.of(engine.policy, 0, device), slot=0)
    longest = config.drafter.train.tokens_per_batch
    pieces = [piece for document in documents for piece in cut(document, longest)]
    trainer.buffer.add(pieces, 0, held_out=False)
    return trainer


# --- streaming --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """`seconds`: from the first request to the last answer; `cpu_s`: processor time of all threads, with the shards
    that are written behind that; `collecting_s`: of that, for making shards of what left the engine."""

    seconds: float
    cpu_s: float
    collecting_s: float


class Streaming:
    """The engine in its thread, as in a rollout worker; shards are collected and written beside the event loop."""

    def __init__(self, engine: Engine, requests: Sequence[RolloutRequest], config: RunConfig, store: BlobStore) -> None:
        self.engine, self.requests, self.store = engine, list(requests), store
        self.settings, self._shards = config.hidden_states, list[HiddenShard]()

    async def measure(self) -> dict[str, float]:
        loop = EngineLoop(self.engine, lambda output: self._on_output(output))
        await self._turn(loop, streams=True)  # the first one compiles and allocates
        turns = [(await self._turn(loop, False), await self._turn(loop, True)) for _ in range(ROUNDS)]
        await loop.close()
        off_s, on_s = min(off.seconds for off, _ in turns), min(on.seconds for _, on in turns)
        off_cpu_s, on_cpu_s = min(off.cpu_s for off, _ in turns), min(on.cpu_s for _, on in turns)
        return {
            "slowdown": on_s / off_s - 1,
            "slowdown_cpu": on_cpu_s / off_cpu_s - 1,
            "collecting_share": min(on.collecting_s for _, on in turns) / off_cpu_s,
            "off_s": off_s,
            "on_s": on_s,
            "answers": len(self.requests),
            "tokens": sum(map(len, self.documents())),
        }

    def documents(self) -> list[Document]:
        """Of the last turn that streamed."""
        return [document for shard in self._shards for document in read_shard(self.store, shard.blob)]

    async def _turn(self, loop: EngineLoop, streams: bool) -> Turn:
        await loop.free()
        self.engine.stream.chunk = self.settings.chunk_tokens if streams else None
        self._collector = ShardStream(self.store, self.settings, 0, "bench") if streams else None
        if streams:
            for shard in self._shards:
                self.store.delete(shard.blob.name)
            self._shards = []
        self._left, self._ended = len(self.requests), asyncio.Event()
        self._writing, self._lock, self._collecting_s = list[asyncio.Task[None]](), asyncio.Lock(), 0.0
        began, used = time.perf_counter(), time.process_time()
        loop.submit(self.requests)
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait({ended, loop.failure}, return_when=asyncio.FIRST_COMPLETED)
        if loop.failure.done():
            loop.failure.result()
        seconds = time.perf_counter() - began
        await asyncio.gather(*self._writing)
        if self._collector is not None:
            self._shards += self._collector.flush()
        return Turn(seconds, time.process_time() - used, self._collecting_s)

    def _on_output(self, output: Output) -> None:
        if self._collector is not None:
            self._writing.append(asyncio.create_task(self._write(self._collector, output)))
        self._left -= len(output.finished) + len(output.refused)
        if not self._left:
            self._ended.set()

    async def _write(self, collector: ShardStream, output: Output) -> None:
        def collect() -> list[HiddenShard]:
            began = time.thread_time()
            shards = [shard for piece in output.pieces for shard in collector.add(piece)]
            shards += [shard for each in output.finished for shard in collector.end(each.request, each.tokens)]
            self._collecting_s += time.thread_time() - began
            return shards

        async with self._lock:
            self._shards += await asyncio.to_thread(collect)


def measure_packing(trainer: DrafterTrainer) -> dict[str, float]:
    """Whole optimizer steps, as many of both, on the same documents: packed as they are drawn, and padded in random
    batches (a draw that fills rows puts documents of like lengths together)."""
    width = trainer.settings.tokens_per_batch
    drawn = [trainer.buffer.draw(width) for _ in range(BATCHES)]
    everything = [document for documents in drawn for document in documents]
    tokens = sum(map(len, everything))
    mixed = Random(0).sample(everything, len(everything))
    mixed = [mixed[number::BATCHES] for number in range(BATCHES)]

    def packed(documents: list[Document]) -> None:
        batch = pack(documents)
        _step(trainer, batch, DocumentAttention(batch.lengths))

    def padded(documents: list[Document]) -> None:
        _step(trainer, pad(documents), CausalAttention())

    seconds = [
        (_time(lambda: [packed(each) for each in drawn]), _time(lambda: [padded(each) for each in mixed]))
        for _ in range(ROUNDS)
    ]
    padded_places = sum(len(each) * max(map(len, each)) for each in mixed)
    return {
        "row_filled": tokens / (width * BATCHES),
        "padded_useful": tokens / padded_places,
        "ratio": min(slow for _, slow in seconds) / min(fast for fast, _ in seconds),
        "packed_tokens_per_s": tokens / min(fast for fast, _ in seconds),
        "padded_tokens_per_s": tokens / min(slow for _, slow in seconds),
    }


def pad(documents: Sequence[Document]) -> Batch:
    """A row a document, as wide as the longest; what is behind an end can't be seen from before it, and has no
    weight."""
    rows = [pack([document]) for document in documents]
    width = max(row.lengths[0] for row in rows)

    def stack(name: str) -> torch.Tensor:
        parts = [getattr(row, name) for row in rows]
        dims = parts[0].dim() - 2
        return torch.cat([F.pad(part, (0, 0) * dims + (0, width - part.shape[1])) for part in parts])

    names = [name for name, value in vars(rows[0]).items() if isinstance(value, torch.Tensor)]
    return Batch(tuple(row.lengths[0] for row in rows), **{name: stack(name) for name in names})


def _step(trainer: DrafterTrainer, batch: Batch, attend: Attend) -> None:
    batch, frozen, settings = batch.to(trainer.device), trainer.frozen, trainer.settings
    embedded_RWC = F.embedding(batch.next_tokens_RW, frozen.embedding)
    predicted_RWC = trainer.drafter(embedded_RWC, batch.hidden_RWC, batch.positions_RW, Ops(attend))
    predicted_NC, targets_NC = predicted_RWC.flatten(0, 1), batch.targets_RWC.flatten(0, 1)
    weight_N = batch.weight_RW.flatten()
    entropy = soft_cross_entropy(predicted_NC, targets_NC, weight_N, frozen)
    distance = feature_loss(predicted_NC, targets_NC, weight_N)
    loss = settings.ce_weight * entropy + settings.hidden_weight * distance
    (loss / weight_N.sum()).backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def _time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def measure_checkpoint(trainer: DrafterTrainer, folder: Path) -> dict[str, float]:
    """`stall_s`: until training may go on; `full_s`: everything with the frozen tensors, synced to the disk."""
    pairs: list[tuple[float, float]] = []
    with ThreadPoolExecutor(1) as thread:
        async with asyncio.TaskGroup() as group:
            keeper = StateKeeper(trainer, folder / "state" / "slot0.safetensors", thread)
            for _ in range(ROUNDS):
                trainer.steps += 1  # something new to save
                began = time.perf_counter()
                await keeper.save(group)
                stall_s = time.perf_counter() - began
                await keeper.settle()
                pairs.append((stall_s, _time(lambda: _save_fully(trainer, folder / "full.safetensors"))))
    stall_s, full_s = min(stall for stall, _ in pairs), min(full for _, full in pairs)
    return {"ratio": full_s / stall_s, "stall_s": stall_s, "full_s": full_s}


def _save_fully(trainer: DrafterTrainer, path: Path) -> None:
    frozen = trainer.frozen
    tensors = {**trainer.tensors(), "norm": frozen.norm.weight, "embedding": frozen.embedding.clone()}
    save_file({**tensors, "head": frozen.head.clone()}, path)
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _show(report: dict[str, Any]) -> None:
    packing, checkpoint = report["packing"], report["checkpoint"]
    memory, streaming = report["loss_memory"], report["streaming"]
    size = f"{memory['tokens']} tokens × {memory['vocabulary']}"
    rows = (
        ("packed / padded, tokens a second", f"{packing['ratio']:.2f}", f"rows {packing['row_filled']:.1%} full; "
         f"of padded ones {packing['padded_useful']:.1%} is of use"),
        ("full save / checkpoint stall", f"{checkpoint['ratio']:.1f}",
         f"{1e3 * checkpoint['full_s']:.1f} ms / {1e3 * checkpoint['stall_s']:.1f} ms"),
        ("plain / chunked loss, peak memory", f"{memory['ratio']:.1f}",
         f"{size}: {memory['plain_mb']:.0f} MB / {memory['chunked_mb']:.0f} MB; "
         f"chunked, {memory['most_tokens']} tokens: {memory['chunked_most_mb']:.0f} MB"),
        ("rollout with / without streaming", f"{1 + streaming['slowdown']:.3f}",
         f"processor time {1 + streaming['slowdown_cpu']:.3f}, shards {streaming['collecting_share']:.1%} of it"),
    )  # fmt: skip
    table = Table("", "ratio", "")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
