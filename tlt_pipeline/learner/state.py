"""The optimizer's state on disk: what the weights alone don't say. One safetensors file a policy version.

    <folder>/v000003.safetensors     <parameter>.exp_avg, <parameter>.exp_avg_sq, <parameter>.step; metadata

A file is there whole or not at all. With the weights of the same version it continues a run to the bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_pipeline.folders import NoSpace
from tlt_pipeline.learner.trainer import Trainer
from tlt_pipeline.rundir import storing, sync_folder

_FORMAT = 1
_NO_SPACE = ("os error 28", "os error 122", "os error 27")


class StateError(RuntimeError):
    """A state file that can't be used; one line with the remedy."""


def save_state(trainer: Trainer, folder: Path, keep: int = 2) -> Path:
    """Writes the state of `trainer.version`, replacing an equal one, and removes all but the `keep` newest.

    Raises NoSpace or StorageError; nothing half-written stays."""
    assert trainer.intact, "the state is between two versions"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"v{trainer.version:06d}.safetensors"
    temporary = folder / f".{target.name}.{os.getpid()}"
    facts = {"format": _FORMAT, "version": trainer.version, "updates": trainer.updates, "seed": trainer.seed}
    try:
        with storing(target):
            save_file(_tensors(trainer), temporary, metadata={"state": json.dumps(facts)})
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
            sync_folder(folder)
    except SafetensorError as error:
        if any(code in str(error) for code in _NO_SPACE):
            raise NoSpace(f"no space left to write {target}: free some, then go on with --resume") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    for old in saved_versions(folder)[:-keep]:
        (folder / f"v{old:06d}.safetensors").unlink(missing_ok=True)
    return target


def saved_versions(folder: Path) -> list[int]:
    """Ascending."""
    return sorted(int(path.stem[1:]) for path in folder.glob("v*.safetensors") if path.stem[1:].isdigit())


def load_state(trainer: Trainer, folder: Path) -> int | None:
    """Gives the trainer the newest state up to its own version; that state's version, or None where there is
    none. Less than `trainer.version`: moments are older than the weights (`checkpoint.every` > 1).

    Raises StateError for a file of another model or one that is torn."""
    usable = [version for version in saved_versions(folder) if version <= trainer.version]
    if not usable:
        return None
    path = folder / f"v{usable[-1]:06d}.safetensors"
    try:
        with safe_open(path, "pt", device=str(trainer.scoring.device)) as file:
            facts = json.loads(file.metadata()["state"])
            names: list[str] = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path} can't be read ({error}): remove it to go on with new optimizer moments") from error
    _restore(trainer, tensors, path)
    trainer.updates = int(facts["updates"])
    return usable[-1]


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, parameter in trainer.policy.named_parameters()
        for key, value in trainer.optimizer.state.get(parameter, {}).items()
    }


def _restore(trainer: Trainer, tensors: dict[str, Tensor], path: Path) -> None:
    moments: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition(".")
        moments.setdefault(parameter, {})[key] = value
    parameters = dict(trainer.policy.named_parameters())
    for name, state in moments.items():
        fits = name in parameters and {"exp_avg", "exp_avg_sq", "step"} == state.keys()
        if not fits or state["exp_avg"].shape != parameters[name].shape:
            raise StateError(f"{path} belongs to another model ({name}): start in a new run directory")
        trainer.optimizer.state[parameters[name]] = {key: torch.clone(value) for key, value in state.items()}
