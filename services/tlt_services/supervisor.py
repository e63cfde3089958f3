"""The processes of one run on this machine: started, started again after a crash, drained, and none left
over.

Every service is a process group of its own, so that Ctrl-C reaches the launcher alone, and so that a
service's own children (verifier pools) can be ended with it. If the launcher is killed, the kernel ends the
services.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog

from tlt_pipeline.config import RunConfig
from tlt_pipeline.failures import EXIT_FAILED, EXIT_FATAL, EXIT_USER
from tlt_pipeline.messages import Role
from tlt_pipeline.processes import PARENT_VARIABLE, slot_threads, usable_cores
from tlt_pipeline.rundir import storing

_LOG_TAIL_BYTES = 64 * 1024
_PROBE_BYTES = 256 * 1024
_RUN_END_GRACE_S = 10.0
"""A service that ended well is not missed for so long: the scheduler that sent Shutdown ends last."""
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)

WaitFunction = Callable[[float], bool]
_log: Any = structlog.get_logger()


class RunEnded(Exception):
    """The run can't go on. One line; `exit_code` 2 is the user's fault."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Service:
    role: Role
    slot: int | None = None

    @property
    def name(self) -> str:
        return self.role if self.slot is None else f"{self.role}-{self.slot}"

    @property
    def command(self) -> list[str]:
        place = [] if self.slot is None else ["--slot", str(self.slot)]
        return [sys.executable, "-m", "tlt_services.cli", self.role, *place]


@dataclass
class Child:
    """One service and the process that runs it now, if any."""

    service: Service
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    restarts: int = 0
    start_at: float = 0.0
    """Not before this time (monotonic): back-off after a crash."""
    ended_well_at: float | None = None
    is_group_gone: bool = True

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


def services_of(config: RunConfig) -> list[Service]:
    """The scheduler first: it is what the others wait for. A drafter that isn't trained is published by its trainer all
    the same."""
    slots = range(config.slots.count)
    drafting = config.engine.speculation.drafter == "eagle"
    trainers = [Service("drafter-trainer", slot) for slot in slots] if drafting else []
    return [
        Service("scheduler"),
        *(Service("rollout", slot) for slot in slots),
        *trainers,
        Service("learner"),
    ]


def threads_of(service: Service, config: RunConfig, cores: int) -> int:
    """CPU threads of a service: those that work at one time never have more than there are cores."""
    a_slot = slot_threads(config, cores)
    if service.role == "scheduler":
        return 1
    if service.role == "learner":
        return config.learner.threads or (cores if config.learner.colocated else a_slot)
    return a_slot


def environment_of(service: Service, config: RunConfig, run_dir: Path, redis_url: str) -> dict[str, str]:
    threads = str(threads_of(service, config, usable_cores()))
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(counts, threads),
        "MKL_DYNAMIC": "FALSE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "REDIS_URL": redis_url,
        "TLT_RUN_DIR": str(run_dir),
        PARENT_VARIABLE: str(os.getpid()),
    }


@dataclass
class Supervisor:
    """Owns the children. `check()` is called after every wake-up; it costs a few system calls."""

    config: RunConfig
    run_dir: Path
    redis_url: str
    keep: frozenset[int] = frozenset()
    """Pids that `kill` leaves alone: the Redis of this run, which goes last."""
    children: list[Child] = field(default_factory=list[Child])

    def start(self, services: Sequence[Service]) -> None:
        logs = self.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        self.children = [Child(service, logs / f"{service.name}.log") for service in services]
        for child in self.children:
            self._spawn(child)

    def check(self, is_complete: Callable[[], bool]) -> bool:
        """Notices ends, starts crashed services again. True once the scheduler ended well and the run is complete.
        Raises RunEnded, StorageError."""
        for child in self.children:
            if child.process is None:
                if time.monotonic() >= child.start_at:
                    self._spawn(child)
                continue
            code = child.process.poll()
            if code is None:
                continue
            self._kill_group(child)
            if code == 0 and child.service.role == "scheduler" and is_complete():
                return True
            self._handle_end(child, code)
        return False

    def stop(self, timeout_s: float, wait: WaitFunction) -> list[str]:
        """SIGTERM to all, up to `timeout_s` to drain, then SIGKILL. Names of those that had to be killed.
        `wait(s)` sleeps until something happens; False from it cuts the draining short."""
        for child in self.children:
            if child.process is not None and child.is_running:
                child.process.terminate()
        return self.finish(timeout_s, wait)

    def finish(self, timeout_s: float, wait: WaitFunction) -> list[str]:
        """Waits for all to end by themselves, then SIGKILL."""
        deadline = time.monotonic() + timeout_s
        while any(child.is_running for child in self.children) and time.monotonic() < deadline:
            if not wait(min(0.2, deadline - time.monotonic())):
                break
        late = [child.service.name for child in self.children if child.is_running]
        self.kill()
        return late

    def kill(self) -> None:
        """Ends every process of the run that is left, and sees to it that it is gone."""
        for child in self.children:
            self._kill_group(child)
            if child.process is not None:
                child.process.wait()
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in self.keep]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)

    def _spawn(self, child: Child) -> None:
        with child.log_path.open("ab") as log:
            child.log_start = log.tell()
            child.process = subprocess.Popen(
                child.service.command,
                env=environment_of(child.service, self.config, self.run_dir, self.redis_url),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        child.ended_well_at, child.is_group_gone = None, False

    def _handle_end(self, child: Child, code: int) -> None:
        name = child.service.name
        if code == 0:
            child.ended_well_at = child.ended_well_at or time.monotonic()
            if time.monotonic() - child.ended_well_at < _RUN_END_GRACE_S:
                return
            _log.warning("service ended although the run goes on, starting it again", service=name)
            self._schedule(child)
            return
        reason = last_reason(child)
        if code in (EXIT_USER, EXIT_FATAL):
            raise RunEnded(f"{name}: {reason or f'exit code {code}, see {child.log_path}'}", _public(code))
        check_space(self.run_dir)
        why = describe_end(code, reason)
        limit = self.config.limits.max_restarts
        if child.restarts >= limit:
            raise RunEnded(
                f"{name} ended {child.restarts + 1} times, last with {why}: see {child.log_path}; "
                f"go on with `tlt run --resume {self.run_dir}`, or raise limits.max_restarts ({limit})",
                EXIT_FAILED,
            )
        child.restarts += 1
        _log.warning("service crashed, starting it again", service=name, why=why, restarts=child.restarts)
        self._schedule(child)

    def _schedule(self, child: Child) -> None:
        child.process = None
        child.start_at = time.monotonic() + _BACKOFF_S[min(child.restarts, len(_BACKOFF_S)) - 1]
        if time.monotonic() >= child.start_at:
            self._spawn(child)

    def _kill_group(self, child: Child) -> None:
        """Ends the service and its own children; once only, because the number may be another's later."""
        if child.process is not None and not child.is_group_gone:
            child.is_group_gone = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)


def check_space(run_dir: Path) -> None:
    """On a full disk a service can't even log why it ends. Raises StorageError."""
    probe = run_dir / f".probe-{os.getpid()}"
    try:
        with storing(run_dir):
            probe.write_bytes(b"\0" * _PROBE_BYTES)
    finally:
        probe.unlink(missing_ok=True)


def last_reason(child: Child) -> str | None:
    """Why the service says it ended: the `reason` of the last `failed` line that this process logged."""
    with child.log_path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(child.log_start, size - _LOG_TAIL_BYTES))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return _failed_reason(reversed(lines)) or _last_words(lines)


def _failed_reason(lines: Iterable[str]) -> str | None:
    for line in lines:
        try:
            entry: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "failed":  # pyright: ignore[reportUnknownMemberType]
            return str(entry.get("reason"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return None


def _last_words(lines: Sequence[str]) -> str | None:
    """Plain text at the end of the log: the CLI's own line, or the last one of a traceback."""
    if lines and not lines[-1].startswith("{"):
        return lines[-1].removeprefix("tlt: ").strip() or None
    return None


def describe_end(code: int, reason: str | None) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how} ({reason})" if reason else how


def _public(code: int) -> int:
    return EXIT_USER if code == EXIT_USER else EXIT_FAILED
