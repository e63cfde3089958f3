"""One service, started by itself: finds its run directory and its slot, then hands over to the service's module."""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.messages import Role
from tlt_pipeline.telemetry.logging import configure_logging
from tlt_services.preparation import is_finished, is_prepared, make_run, resume_run

_POLL_S = 0.2
_RESUME_GRACE_S = 10.0
"""For so long a service looks whether the scheduler gives a finished run more steps."""


def serve(role: Role, slot: str | None, config: Path | None, overrides: list[str], run_dir: Path | None) -> int:
    """Runs the service to its end; its exit code. Raises ConfigError for what the user gave."""
    signal.signal(signal.SIGTERM, _leave)  # until the actor has a handler of its own
    configure_logging(os.environ.get("TLT_LOG_LEVEL", "info"))
    settings = load_config(config, overrides) if config else None
    directory = _choose_run_dir(settings, run_dir, role)
    if role == "scheduler" and config is not None and settings is not None:
        if is_prepared(directory):
            resume_run(config, overrides, directory)
        else:
            make_run(settings, directory, fresh=False)
    if _is_over(directory, role):
        return 0
    number = None if slot is None else _choose_slot(slot, role, directory)
    module = importlib.import_module(f"tlt_services.{role.replace('-', '_')}")
    return int(module.main(directory, number))


def _leave(_number: int, _frame: FrameType | None) -> None:
    """There is nothing to drain yet."""
    sys.exit(0)


def _is_over(directory: Path, role: Role) -> bool:
    """Whether there is nothing to do: the run is finished, and the scheduler, started at the same time, gives it no
    more steps."""
    deadline = time.monotonic() + (0.0 if role == "scheduler" else _RESUME_GRACE_S)
    while is_finished(directory):
        if time.monotonic() >= deadline:
            log: Any = structlog.get_logger()
            log.info(f"the run in {directory} is finished: raise steps, or name another run directory", role=role)
            return True
        time.sleep(_POLL_S)
    return False


def _choose_run_dir(settings: RunConfig | None, given: Path | None, role: str) -> Path:
    if given is not None:
        return given
    if settings is not None and settings.run_dir is not None:
        return Path(settings.run_dir)
    raise ConfigError(
        f"tlt {role} shares a run directory with the run's other services: name it with --run-dir DIR, "
        f"$TLT_RUN_DIR, or run_dir in the config"
    )


def _choose_slot(text: str, role: Role, directory: Path) -> int:
    if text.isdigit():
        return int(text)
    if text != "auto":
        raise ConfigError(f"--slot {text!r}: give the number of a slot, or auto for the first free one")
    log: Any = structlog.get_logger()
    if not is_prepared(directory):
        log.info(f"waiting for the run directory {directory} (the scheduler prepares it)", role=role)
    while not is_prepared(directory):
        time.sleep(_POLL_S)
    count = load_config(directory / "config.yaml").slots.count
    return claim_slot(directory / "slots", role, count)


def claim_slot(folder: Path, role: str, count: int) -> int:
    """The first slot that no living process of this role has. The claim is a file lock held until this process
    ends, however it ends. Raises ConfigError when all are taken."""
    folder.mkdir(exist_ok=True)
    for slot in range(count):
        lock = os.open(folder / f"{role}-{slot}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return slot
    raise ConfigError(f"all {count} slots have a {role} process: raise slots.count, or start fewer")
