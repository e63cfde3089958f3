"""The journal: every request and completion of a run, on disk, for replay without Redis.

Append-only files, one a process and start, `<kind>-<ns since the epoch>-<pid>.bin`: a header, then frames of
length (u32), CRC-32 (u32), message (msgpack), little-endian. An append is in the kernel's hands when it
returns, so that a killed process loses nothing; fsync follows at most once a second and at close, so a power
cut loses about a second. A torn tail is skipped with a line in the log.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, overload

import structlog

from tlt_pipeline.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Completion,
    InvalidMessage,
    RolloutRequest,
    decode,
    encode,
)
from tlt_pipeline.rundir import explain_storage, storing

JournalKind = Literal["requests", "completions"]
_Entry = TypeVar("_Entry", RolloutRequest, Completion)
_HEADER = b"TLTJ\x01\r\n\x00"
_FRAME = struct.Struct("<II")
_ROTATE_BYTES = 64 << 20
_SYNC_S = 1.0
_log = structlog.get_logger("tlt.journal")


class Journal:
    """Appends to a run's journal. For one thread; each process has its own. A context manager."""

    def __init__(self, folder: Path, *, rotate_bytes: int = _ROTATE_BYTES) -> None:
        """Raises StorageError where the folder can't be made."""
        self._folder = folder
        self._rotate_bytes = rotate_bytes
        self._files: dict[JournalKind, _JournalFile] = {}
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def append(self, message: RolloutRequest | Completion) -> None:
        """Raises StorageError (disk full, permissions); the file then ends with the frame before."""
        kind: JournalKind = "requests" if isinstance(message, RolloutRequest) else "completions"
        file = self._files.get(kind)
        if file is not None and file.size >= self._rotate_bytes:
            file.close()
            file = None
        if file is None:
            file = self._files[kind] = _JournalFile(self._folder, kind)
        file.append(encode(message))

    def sync(self) -> None:
        """Everything appended so far survives a power cut. Raises StorageError."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _JournalFile:
    def __init__(self, folder: Path, kind: JournalKind) -> None:
        self._path = folder / f"{kind}-{time.time_ns():020d}-{os.getpid()}.bin"
        self.size = 0
        self._synced_at = time.monotonic()
        with storing(self._path):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._write(_HEADER)

    def append(self, body: bytes) -> None:
        self._write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
        if time.monotonic() - self._synced_at >= _SYNC_S:
            self.sync()

    def sync(self) -> None:
        with storing(self._path):
            os.fsync(self._descriptor)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        """All of it or none: half a frame would hide the ones after it."""
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self.size)
            os.lseek(self._descriptor, self.size, os.SEEK_SET)
            raise explain_storage(self._path, error) from error
        self.size += len(data)


@overload
def read_journal(folder: Path, kind: Literal["requests"]) -> Iterator[RolloutRequest]: ...
@overload
def read_journal(folder: Path, kind: Literal["completions"]) -> Iterator[Completion]: ...
def read_journal(folder: Path, kind: JournalKind) -> Iterator[RolloutRequest] | Iterator[Completion]:
    """What all processes of the run have appended, oldest file first, each request id once (the first one).
    Reads while others write. Damaged frames are skipped with a line in the log. Raises StorageError."""
    return _read(folder, kind, RolloutRequest) if kind == "requests" else _read(folder, kind, Completion)


def _read(folder: Path, kind: JournalKind, expected: type[_Entry]) -> Iterator[_Entry]:
    seen: set[str] = set()
    for path in sorted(folder.glob(f"{kind}-*.bin")):
        for offset, body in _frames(path):
            message = _message(path, offset, body)
            if isinstance(message, expected) and message.request_id not in seen:
                seen.add(message.request_id)
                yield message


def _message(path: Path, offset: int, body: bytes) -> AnyMessage | None:
    try:
        return decode(body)
    except InvalidMessage as error:
        _log.warning("journal: skipped a frame that is no message", file=path.name, offset=offset, reason=str(error))
        return None


def _frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, body) of the frames whose checksum fits."""
    with storing(path), path.open("rb") as file:
        if file.read(len(_HEADER)) != _HEADER:
            _log.warning("journal: skipped a file without our header", file=path.name)
            return
        offset = len(_HEADER)
        while head := file.read(_FRAME.size):
            length, checksum = _FRAME.unpack(head) if len(head) == _FRAME.size else (0, 0)
            body = file.read(length) if length <= MAX_MESSAGE_BYTES else b""
            if not length or len(body) < length:
                left = path.stat().st_size - offset
                _log.warning("journal: skipped a torn tail", file=path.name, offset=offset, bytes=left)
                return
            if zlib.crc32(body) == checksum:
                yield offset, body
            else:
                _log.warning("journal: skipped a damaged frame", file=path.name, offset=offset, bytes=length)
            offset += _FRAME.size + length
