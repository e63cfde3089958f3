"""A full disk, for tests, without filling one, and files that may not be read."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes past `size` bytes fail, as on a full disk (which root's own limits don't stop)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Not even root may read `path`: it becomes somebody else meanwhile."""
    mode, user = path.stat().st_mode, os.geteuid()
    open_up = [each for each in path.parents if each.stat().st_uid == user and not each.stat().st_mode & 0o001]
    modes = [each.stat().st_mode for each in open_up]
    for each, before in zip(open_up, modes, strict=True):
        each.chmod(before | 0o055)
    path.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        path.chmod(mode)
        for each, before in zip(open_up, modes, strict=True):
            each.chmod(before)
