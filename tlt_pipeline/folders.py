"""Folders of files that appear whole or not at all, and their hashes.

A folder is written under a temporary name beside its place, synced to disk and renamed: a reader never
sees half of it, and a crash leaves only a temporary one, which `sweep` removes later.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PREFIX = ".tmp-"
_STALE_S = 3600.0

Digest = dict[str, tuple[int, str]]
"""File name -> (size in bytes, SHA-256)."""


class NoSpace(RuntimeError):
    """The disk is full; one line, to which `failures.explain` adds how the command at hand takes another place."""


@contextmanager
def draft_folder(target: Path) -> Generator[Path]:
    """A new empty folder beside `target`, to be filled and handed to `put_in_place`; removed at the end if it
    is still there. Raises NoSpace where writing found the disk full."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = temporary_beside(target)
    folder.mkdir()
    try:
        yield folder
    except Exception as error:
        if _is_full(error):
            free = shutil.disk_usage(target.parent).free // 2**20
            raise NoSpace(f"no space left to write {target} ({free} MB free): free some") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> bool:
    """Syncs and renames; False if something was there already, which then stays as it is."""
    mode = _usual_mode(folder)
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors makes its files unreadable for others
        _sync(path)
    _sync(folder)
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    _sync(target.parent)
    return True


def replace_folder(folder: Path, target: Path) -> None:
    """As `put_in_place`; what was there makes way."""
    while not put_in_place(folder, target):
        remove_folder(target)


def remove_folder(target: Path) -> None:
    """Renamed before it is deleted, so that a half-deleted one is never seen. Nothing there is no error."""
    doomed = temporary_beside(target)
    try:
        target.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes what crashed writers left in `parent` more than an hour ago."""
    for left in parent.glob(f"{_PREFIX}*"):
        if _age(left) > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def digest(folder: Path, besides: str) -> Digest:
    """Size and SHA-256 of each file, but for the one named `besides`."""
    found: Digest = {}
    for path in sorted(folder.iterdir()):
        if path.name != besides:
            with path.open("rb") as file:
                found[path.name] = (path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return found


def combine(files: Mapping[str, tuple[int, str]]) -> str:
    """One SHA-256 for all of them, names included."""
    lines = "".join(f"{checksum} {size} {name}\n" for name, (size, checksum) in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def temporary_beside(target: Path) -> Path:
    return target.parent / f"{_PREFIX}{uuid.uuid4().hex}"


def _is_full(error: Exception) -> bool:
    """safetensors reports a full disk as an error of its own, with the errno in its text only."""
    code = getattr(error, "errno", None)
    return code in _NO_SPACE or any(f"(os error {code})" in str(error) for code in _NO_SPACE)


def _usual_mode(folder: Path) -> int:
    """What the umask gives a new file."""
    probe = temporary_beside(folder / "any")
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
