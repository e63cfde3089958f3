"""Blobs as files in a folder.

A blob is written to a temporary name and renamed, so that a reader sees it whole or not at all. There is no
fsync: a blob that a power cut damaged fails its hash, and is dropped or made again like any other that is
gone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Collection
from pathlib import Path

from tlt_pipeline.blobs.store import STALE_S, BlobCorrupt, BlobMissing, check_name, reference_of
from tlt_pipeline.messages import BlobRef
from tlt_pipeline.rundir import storing

_TEMPORARY = ".writing-"


class FileBlobs:
    """A folder of blobs, for its owner only. Several processes may use one at a time."""

    def __init__(self, root: Path) -> None:
        """Makes the folder (mode 0700) and removes what writers that died have left. Raises StorageError."""
        self.root = root
        with storing(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.chmod(0o700)
            for entry in os.scandir(root):
                if entry.name.startswith(_TEMPORARY) and _age_s(entry) > STALE_S:
                    Path(entry.path).unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> BlobRef:
        """Stores `data` under a base name, replacing what had it. Raises ValueError for a name with a folder
        in it, StorageError (disk full, permissions) with nothing left behind."""
        path = self._path(name)
        temporary = self.root / f"{_TEMPORARY}{name[:100]}-{secrets.token_hex(6)}"
        with storing(path):
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        return reference_of(name, data)

    def read(self, ref: BlobRef) -> bytes:
        """The blob's bytes. Raises BlobMissing; BlobCorrupt: a bad name, no regular file, other size or
        hash."""
        try:
            path = self._path(ref.name)
        except ValueError as error:
            raise BlobCorrupt(str(error)) from error
        try:
            # Non-blocking, so that a FIFO in the blob's place can't hang the reader.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise BlobMissing(f"blob {ref.name} is not in {self.root}") from None
        except OSError as error:
            raise BlobCorrupt(f"blob {ref.name} can't be opened as a regular file: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BlobCorrupt(f"blob {ref.name} is no regular file")
            if found.st_size != ref.size:
                raise BlobCorrupt(f"blob {ref.name} has {found.st_size} bytes, its reference says {ref.size}")
            with storing(path):
                data = file.read(ref.size + 1)
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise BlobCorrupt(f"blob {ref.name} has another content than its reference says")
        return data

    def delete(self, name: str) -> None:
        """Removes the blob; no error if it is gone already. Raises ValueError for a bad name,
        StorageError."""
        path = self._path(name)
        with storing(path):
            path.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Of the blobs that are whole, sorted."""
        with storing(self.root):
            return sorted(entry.name for entry in os.scandir(self.root) if not entry.name.startswith("."))

    def remove_unknown(self, known: Collection[str], older_than_s: float = STALE_S) -> int:
        """Deletes blobs that nobody has a reference to: their writer died before it could say so. How many."""
        with storing(self.root):
            old = [entry.name for entry in os.scandir(self.root) if _age_s(entry) > older_than_s]
        orphans = [name for name in old if name not in known]
        for name in orphans:
            with storing(self.root):
                (self.root / name).unlink(missing_ok=True)
        return len(orphans)

    def bytes_used(self) -> int:
        """Bytes in the folder, unfinished blobs included."""
        total = 0
        with storing(self.root):
            for entry in os.scandir(self.root):
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # deleted meanwhile
        return total

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)


def _age_s(entry: os.DirEntry[str]) -> float:
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0
