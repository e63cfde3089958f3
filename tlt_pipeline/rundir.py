"""The run directory: its layout, its id, and files that are whole or not there. No torch.

config.yaml  run_id  redis_url  metrics.jsonl  summary.json
weights/  checkpoints/  journal/  logs/  blobs/  tensorboard/  redis/
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

_FOLDERS = ("weights", "checkpoints", "journal", "logs", "blobs", "tensorboard", "redis")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class RunDirError(ValueError):
    """The directory that was named can't hold this run; one line with the remedy."""


class StorageError(OSError):
    """A file can't be written or read: disk full, quota, permissions, a failing device. One line with the
    remedy."""


@dataclass(frozen=True)
class RunDir:
    """Paths of one run; says nothing about whether they exist."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def run_id_file(self) -> Path:
        return self.root / "run_id"

    @property
    def redis_url(self) -> Path:
        return self.root / "redis_url"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    def log(self, role: str, slot: int | None = None) -> Path:
        return self.logs / (f"{role}.log" if slot is None else f"{role}-{slot}.log")

    def run_id(self) -> str:
        """Raises RunDirError where no run was prepared."""
        try:
            found = self.run_id_file.read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            found = ""
        if not found:
            raise RunDirError(f"{self.root} holds no run: give the directory of one, or start it with `tlt run CONFIG`")
        return found


def prepare_run_dir(path: str | Path, name: str, *, fresh: bool = False) -> RunDir:
    """Makes the directory with its folders, and its run id unless it has one. Safe to repeat and to race.

    Raises RunDirError: not writable, a file is in the way, or it holds a run already and must be `fresh`."""
    run = RunDir(Path(path).absolute())
    if fresh and run.run_id_file.exists():
        raise RunDirError(f"{run.root} holds a run already: go on with it (--resume), or name another --run-dir")
    try:
        for folder in _FOLDERS:
            (run.root / folder).mkdir(parents=True, exist_ok=True)
        _write_once(run.run_id_file, f"{slug(name)}-{secrets.token_hex(4)}\n")
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirError(f"{error.filename} is a file: name another --run-dir") from error
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise RunDirError(f"{run.root} is not writable: name another --run-dir") from error
        raise explain_storage(run.root, error) from error
    return run


def write_atomic(path: Path, content: bytes | str) -> None:
    """Temporary file in the same folder, fsync, rename: readers see the old file or the new one, also after a
    crash.

    Raises StorageError; nothing is left behind then."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with storing(path):
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder last through a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storing(path: Path) -> Generator[None, None, None]:
    """Turns an OSError inside into a StorageError about `path`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise explain_storage(path, error) from error


def explain_storage(path: Path, error: OSError) -> StorageError:
    """The error as one line with the remedy."""
    if error.errno in _FULL:
        return StorageError(f"no space left for {path}: free some, then go on with --resume")
    if error.errno in _FORBIDDEN:
        return StorageError(f"not allowed to write or read {path}: see to its permissions, then go on with --resume")
    return StorageError(f"{path}: {error.strerror or error}: see to the disk, then go on with --resume")


def slug(name: str) -> str:
    """The name as it may stand in a Redis key and a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:64] or "run"


def _write_once(path: Path, content: str) -> None:
    """The file appears whole; where two race, the first stays."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        temporary.rename(path)  # a file system without hard links
    finally:
        temporary.unlink(missing_ok=True)
