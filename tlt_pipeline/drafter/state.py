"""A trainer's state on disk: what its published versions don't say. One small safetensors file a slot.

    checkpoints/drafter/slot0.safetensors     drafter.*, average.*, exp_avg.*, exp_avg_sq.*, step.*; metadata

Only what is trained is in it: the policy's frozen tensors are not, nor the data, which the scheduler hands out anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.rundir import storing

_FORMAT = 1
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


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
