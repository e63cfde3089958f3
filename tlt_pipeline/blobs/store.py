"""What every store of blobs does, and what its readers must expect."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Protocol

from tlt_pipeline.messages import BlobRef

STALE_S = 600.0
"""A blob so old that nobody has a reference to won't get one any more."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class BlobMissing(LookupError):
    """The blob is not there (deleted, expired, or on another machine); one line."""


class BlobCorrupt(ValueError):
    """What lies under the blob's name is not what the reference says; one line."""


class BlobTooLarge(ValueError):
    """The store takes none of this size; one line with the remedy."""


class BlobStore(Protocol):
    """Several processes may use one at a time. Its calls block: they belong in a thread. Besides what they name, they
    raise StorageError (a disk) or BusError (Redis), one line."""

    def write(self, name: str, data: bytes) -> BlobRef:
        """Stores `data` under a base name, replacing what had it. Raises ValueError for a bad name, BlobTooLarge;
        nothing is left behind then."""
        ...

    def read(self, ref: BlobRef) -> bytes:
        """The blob's bytes. Raises BlobMissing; BlobCorrupt: a bad name, other size or hash."""
        ...

    def delete(self, name: str) -> None:
        """Removes the blob; no error if it is gone already. Raises ValueError for a bad name."""
        ...

    def names(self) -> list[str]:
        """Of the blobs that are whole, sorted."""
        ...

    def remove_unknown(self, known: Collection[str], older_than_s: float = STALE_S) -> int:
        """Deletes blobs that nobody has a reference to: their writer died before it could say so. How many."""
        ...

    def bytes_used(self) -> int:
        """Bytes of all blobs, unfinished ones included."""
        ...


def check_name(name: str) -> str:
    """Raises ValueError for a name that is more than one, or hidden."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no blob name: letters, digits, '.', '_' and '-' only, up to 200")
    return name


def reference_of(name: str, data: bytes) -> BlobRef:
    return BlobRef(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
