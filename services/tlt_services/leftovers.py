"""Hidden states in memory: a run that is stopped takes them along into its run directory, and has them again when it is
resumed; of a launcher that was killed, they are removed by the next one, unless that resumes the run.

Beside the folder of a run's shards lies a link `<folder>.run` to its run directory, whose lock says if it is alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import structlog

from tlt_pipeline.blobs import FileBlobs, hidden_states_root
from tlt_pipeline.config import ConfigError, RunConfig
from tlt_pipeline.rundir import RunDir, RunDirError, StorageError, storing

_SUFFIX = ".run"
_log: Any = structlog.get_logger()


@contextlib.contextmanager
def sole_launcher(run: RunDir) -> Generator[None]:
    """Holds the run directory. Raises RunDirError where another `tlt run` has it."""
    with storing(run.root):
        lock = os.open(run.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(f"{run.root} is in use by another tlt run: stop that one first") from None
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def holding_shards(config: RunConfig, run: RunDir) -> Generator[None]:
    """The run's folder of hidden states, while its processes need it. A run that has ended has none, one that was
    stopped keeps them on disk. In Redis they stay where they are. Raises as `claim_shards`."""
    if config.hidden_states.store == "redis":
        yield
        return
    claim_shards(config, run)
    try:
        yield
    finally:
        keep_shards(config, run)
        remove_shards(config, run)


def claim_shards(config: RunConfig, run: RunDir) -> None:
    """Removes what killed launchers left beside this run's shards, makes their folder and says whose it is. Raises
    ConfigError: it can't be made."""
    shards = hidden_states_root(config.hidden_states, run)
    if shards.is_relative_to(run.root):
        return
    try:
        shards.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"hidden states can't go to {shards} ({error.strerror}): set hidden_states.root") from error
    with storing(shards):
        own = shards.with_name(shards.name + _SUFFIX)
        for link in shards.parent.glob(f"*{_SUFFIX}"):
            if link != own and link.is_symlink() and not _is_alive(link.readlink()):
                _remove(link)
        own.unlink(missing_ok=True)
        own.symlink_to(run.root.resolve())
        _move(run.blobs, shards)


def keep_shards(config: RunConfig, run: RunDir) -> None:
    """What the scheduler has not deleted at the run's end, into the run directory; where that is full, it is lost."""
    shards = hidden_states_root(config.hidden_states, run)
    if shards.is_relative_to(run.root):
        return
    try:
        run.blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        _move(shards, run.blobs)
    except (OSError, StorageError) as error:
        _log.warning("hidden states are not kept: training begins without when resumed", reason=str(error))


def remove_shards(config: RunConfig, run: RunDir) -> None:
    shards = hidden_states_root(config.hidden_states, run)
    if not shards.is_relative_to(run.root):
        _remove(shards.with_name(shards.name + _SUFFIX))


def _remove(link: Path) -> None:
    shutil.rmtree(link.with_name(link.name.removesuffix(_SUFFIX)), ignore_errors=True)
    link.unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Whole blobs only; one that is there already is the same."""
    if source.is_dir():
        for name in FileBlobs(source).names():
            shutil.move(source / name, target / name)


def _is_alive(root: Path) -> bool:
    try:
        lock = os.open(root / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # someone else's: theirs to remove
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
