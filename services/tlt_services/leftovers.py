"""Hidden states in memory outlive a launcher that was killed: the next one removes what no run holds any more.

Beside the folder of a run's shards lies a link `<folder>.run` to its run directory, whose lock says if it is alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from tlt_pipeline.blobs import hidden_states_root
from tlt_pipeline.config import ConfigError, RunConfig
from tlt_pipeline.rundir import RunDir, RunDirError, storing

_SUFFIX = ".run"


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
    """The run's folder of hidden states, while its processes need it: a stopped run doesn't hold any, and one that is
    resumed makes new ones. Raises as `claim_shards`."""
    claim_shards(config, run)
    try:
        yield
    finally:
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
        for link in shards.parent.glob(f"*{_SUFFIX}"):
            if link.is_symlink() and not _is_alive(link.readlink()):
                _remove(link)
        link = shards.with_name(shards.name + _SUFFIX)
        link.unlink(missing_ok=True)
        link.symlink_to(run.root.resolve())


def remove_shards(config: RunConfig, run: RunDir) -> None:
    shards = hidden_states_root(config.hidden_states, run)
    if not shards.is_relative_to(run.root):
        _remove(shards.with_name(shards.name + _SUFFIX))


def _remove(link: Path) -> None:
    shutil.rmtree(link.with_name(link.name.removesuffix(_SUFFIX)), ignore_errors=True)
    link.unlink(missing_ok=True)


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
