"""A trainer's state on disk: what its published versions don't say. One small safetensors file a slot.

    checkpoints/drafter/slot0.safetensors     drafter.*, average.*, exp_avg.*, exp_avg_sq.*, step.*; metadata

Other slots read from it what this one has learned and not published: a slot that was recalled early, or died, counts
with what it did.

Only what is trained is in it: the policy's frozen tensors are not, nor the data, which the scheduler hands out anew.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_pipeline.drafter.merging import Work
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.rundir import storing

MOST_OTHERS = 8
"""Other slots' work is looked at in one judgement at most: each costs an evaluation."""
_FORMAT = 1
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


_log: Any = structlog.get_logger("tlt.drafter")


class StateUnusable(ValueError):
    """A state file that can't be used; one line with the remedy."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of a trainer's state: written while it goes on."""

    tensors: dict[str, Tensor]
    facts: dict[str, int]


def state_path(checkpoints: Path, slot: int) -> Path:
    return checkpoints / "drafter" / f"slot{slot}.safetensors"


def take_snapshot(trainer: DrafterTrainer) -> Snapshot:
    facts = {
        "format": _FORMAT,
        "parent": trainer.parent,
        "steps": trainer.steps,
        "tokens_trained": trainer.tokens_trained,
        "tokens_since_parent": trainer.tokens_since_parent,
    }
    return Snapshot(trainer.tensors(), facts)


def write_snapshot(snapshot: Snapshot, path: Path) -> None:
    """Replaces the file as a whole. Not synced to disk: after a power cut the published versions are there.

    Raises StorageError with the old file kept."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in snapshot.tensors.items()}
            save_file(tensors, temporary, metadata={"state": json.dumps(snapshot.facts)})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def read_work(path: Path, like: Drafter) -> Work:
    """What a trainer had learned when it last saved, without its optimizer. Raises StateUnusable for a file of another
    model, or damaged, or gone."""
    found = copy.deepcopy(like)
    try:
        with safe_open(path, "pt", device=str(like.fc.weight.device)) as file, torch.no_grad():
            facts: dict[str, int] = json.loads(file.metadata()["state"])
            for name, parameter in found.named_parameters():
                tensor: Tensor = file.get_tensor(f"average.{name}")
                if tensor.shape != parameter.shape:
                    raise ValueError(f"average.{name} is {tuple(tensor.shape)}, here {tuple(parameter.shape)}")
                parameter.copy_(tensor)
        return Work(found, int(facts["parent"]), int(facts["tokens_since_parent"]), "left_behind")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise StateUnusable(f"{path} can't be used: {' '.join(str(error).split())}") from error


def restore(trainer: DrafterTrainer, path: Path) -> bool:
    """Gives the trainer the saved state; False if there is none. Raises StateUnusable for a file of another model, or
    damaged; the trainer is unchanged then."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt", device=str(trainer.device)) as file:
            facts: dict[str, int] = json.loads(file.metadata()["state"])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        counters = {name: int(facts[name]) for name in ("parent", "steps", "tokens_trained", "tokens_since_parent")}
        _check(trainer, tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise StateUnusable(f"{path} can't be used ({line}): remove it to train from the published version") from error
    _apply(trainer, tensors)
    for name, value in counters.items():
        setattr(trainer, name, value)
    return True


def _check(trainer: DrafterTrainer, tensors: dict[str, Tensor]) -> None:
    for name, parameter in trainer.drafter.named_parameters():
        for kind in ("drafter", "average"):
            found = tensors[f"{kind}.{name}"]
            if found.shape != parameter.shape:
                raise ValueError(f"{kind}.{name} is {tuple(found.shape)}, the drafter's is {tuple(parameter.shape)}")


@torch.no_grad()
def _apply(trainer: DrafterTrainer, tensors: dict[str, Tensor]) -> None:
    averages = dict(trainer.average.named_parameters())
    for name, parameter in trainer.drafter.named_parameters():
        parameter.copy_(tensors[f"drafter.{name}"])
        averages[name].copy_(tensors[f"average.{name}"])
        if all(f"{moment}.{name}" in tensors for moment in _MOMENTS):
            trainer.optimizer.state[parameter] = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}


class StateKeeper:
    """Saves a trainer's state while it goes on: copied in `thread`, where the trainer lives, written beside it."""

    def __init__(self, trainer: DrafterTrainer, path: Path, thread: ThreadPoolExecutor) -> None:
        self._trainer, self._path, self._thread = trainer, path, thread
        self._writing: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._steps = trainer.steps
        self.saved_at = time.monotonic()

    async def save(self, group: asyncio.TaskGroup) -> None:
        """Returns when the copy is made; the write ends by itself. Nothing new: nothing is done."""
        async with self._one_at_a_time:
            await self.settle()
            if self._trainer.steps == self._steps:
                return
            loop = asyncio.get_running_loop()
            snapshot = await loop.run_in_executor(self._thread, take_snapshot, self._trainer)
            self._steps, self.saved_at = snapshot.facts["steps"], time.monotonic()
            self._writing = group.create_task(asyncio.to_thread(write_snapshot, snapshot, self._path), name="save")

    async def settle(self) -> None:
        """Waits for a write that is under way."""
        if self._writing is not None:
            await self._writing


class LeftBehind:
    """What the other slots' trainers have learned and not published, as their states on disk say; each once."""

    def __init__(self, own: Path) -> None:
        self._own = own
        self._seen: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()

    def read(self, like: Drafter) -> list[Work]:
        """Of states written since the last call; at most `MOST_OTHERS`, those with the most tokens."""
        found: list[Work] = []
        for path in sorted(self._own.parent.glob("slot*.safetensors")):
            if path == self._own or not self._is_new(path):
                continue
            try:
                work = read_work(path, like)
            except StateUnusable as error:
                self.counts["state_of_another_slot_unusable"] += 1
                _log.warning("state of another slot not used", reason=str(error))
                continue
            if work.tokens > 0:
                found.append(work)
        return sorted(found, key=lambda work: -work.tokens)[:MOST_OTHERS]

    def _is_new(self, path: Path) -> bool:
        try:
            written = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        known = self._seen.get(path)
        self._seen[path] = written
        return known != written
