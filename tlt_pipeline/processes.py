"""Processes that must not outlive the one that started them (Linux: PR_SET_PDEATHSIG; elsewhere the
supervisor's own clean-up is all there is)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlt_pipeline.config import RunConfig

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
PARENT_VARIABLE = "TLT_PARENT_PID"


def die_with_parent(parent: int | None = None) -> None:
    """This process gets SIGKILL when the thread that started it ends. `parent`: its pid as the parent wrote
    it down, to notice a parent that was gone before this call. Fit for a process pool's initializer."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def bind_to_launcher() -> None:
    """In a service: die with the launcher that is named in the environment."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent))


def adopt_orphans() -> None:
    """Grandchildren whose parent died become children of this process, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def usable_cores() -> int:
    """Affinity and the container's CPU quota, whichever is less; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return max(1, cores)


def slot_threads(config: RunConfig, cores: int | None = None) -> int:
    """CPU threads of what works on one slot. Replay has as many as the rollout had: answers are equal to the bit with
    the same number of threads. `cores`: None: those that this process may use."""
    cores = usable_cores() if cores is None else cores
    return config.engine.threads or max(cores // config.slots.count, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")
