"""Blobs as keys of Redis, each with a time to live: for machines that share no folder.

A hash of the run lists names and sizes, so that nobody has to scan a server that others use too; it lives as long as
the youngest blob. A blob's age is what is missing from its time to live, by the server's clock alone.

A shard is worth less than the rollout's time: writing tries once, for a second, and then leaves a server that didn't
answer alone for a while. Reading and cleaning up are tried again within a second.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from redis import exceptions as rx

from tlt_pipeline.blobs.store import STALE_S, BlobCorrupt, BlobMissing, BlobTooLarge, check_name, reference_of
from tlt_pipeline.bus.link import BusError, BusFull, redact_url
from tlt_pipeline.bus.probe import AWAY, connect
from tlt_pipeline.bus.streams import Keys
from tlt_pipeline.messages import BlobRef

LARGEST_BLOB = 16 << 20
"""Bytes. The server does nothing else while it takes one in or hands it out: some 50 ms."""
_TIMEOUT_S = 1.0
_PATIENCE_S = 1.0
_PAUSE_S = 0.05
_REST_S = 5.0
T = TypeVar("T")


class RedisBlobs:
    """A run's blobs on a server, each for `ttl_s` seconds."""

    def __init__(self, url: str, run_id: str, ttl_s: float) -> None:
        """Raises RedisUnusable for a malformed URL; connects at the first call."""
        self._address = redact_url(url)
        self._client = connect(url, self._address, connect_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S)
        self._keys = Keys(run_id)
        self._ttl_ms = int(1000 * ttl_s)
        self._rest_until = 0.0

    def write(self, name: str, data: bytes) -> BlobRef:
        """As BlobStore says; an empty blob can't be told from none."""
        assert data, "an empty blob"
        key = self._keys.blob(check_name(name))
        if len(data) > LARGEST_BLOB:
            raise BlobTooLarge(
                f"blob {name} has {len(data)} bytes, through Redis go {LARGEST_BLOB} at most: lower "
                "hidden_states.shard_tokens, or set hidden_states.store to files"
            )

        def store(client: Any) -> None:
            pipe = client.pipeline(transaction=True)
            pipe.execute_command("SET", key, data, "PX", self._ttl_ms)
            pipe.execute_command("HSET", self._keys.blobs(), name, len(data))
            pipe.execute_command("PEXPIRE", self._keys.blobs(), self._ttl_ms)
            pipe.execute()

        self._ask_once(store)
        return reference_of(name, data)

    def read(self, ref: BlobRef) -> bytes:
        try:
            key = self._keys.blob(check_name(ref.name))
        except ValueError as error:
            raise BlobCorrupt(str(error)) from error
        # The size first: what took the blob's place may be of any.
        size = self._ask(lambda client: client.execute_command("STRLEN", key))
        if size not in (0, ref.size):
            raise BlobCorrupt(f"blob {ref.name} has {size} bytes, its reference says {ref.size}")
        data = self._ask(lambda client: client.execute_command("GET", key)) if size else None
        if data is None:
            raise BlobMissing(f"blob {ref.name} is not in Redis at {self._address} (any more)")
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise BlobCorrupt(f"blob {ref.name} has another content than its reference says")
        return data

    def delete(self, name: str) -> None:
        check_name(name)
        self._ask(lambda client: self._remove(client, [name]))

    def names(self) -> list[str]:
        return sorted(self._ask(self._look))

    def remove_unknown(self, known: Collection[str], older_than_s: float = STALE_S) -> int:
        found = self._ask(self._look)
        orphans = [name for name, (_, age_s) in found.items() if age_s > older_than_s and name not in known]
        if orphans:
            self._ask(lambda client: self._remove(client, orphans))
        return len(orphans)

    def bytes_used(self) -> int:
        return sum(size for size, _ in self._ask_once(self._look).values())

    def memory_limit(self) -> int:
        """The server's maxmemory in bytes; 0: none."""
        info: bytes = self._ask(lambda client: client.execute_command("INFO", "memory"))
        facts = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        return int(facts.get(b"maxmemory", 0))

    def _look(self, client: Any) -> dict[str, tuple[int, float]]:
        """Size and age in seconds of every blob; those that expired leave the list."""
        flat: list[bytes] = client.execute_command("HGETALL", self._keys.blobs())
        sizes = {name.decode(): int(size) for name, size in zip(flat[::2], flat[1::2], strict=True)}
        pipe = client.pipeline(transaction=False)
        for name in sizes:
            pipe.execute_command("PTTL", self._keys.blob(name))
        left_ms: dict[str, int] = dict(zip(sizes, pipe.execute(), strict=True))
        gone = [name for name, left in left_ms.items() if left < 0]
        if gone:
            client.execute_command("HDEL", self._keys.blobs(), *gone)
        return {name: (sizes[name], (self._ttl_ms - left) / 1000) for name, left in left_ms.items() if left >= 0}

    def _remove(self, client: Any, names: list[str]) -> None:
        pipe = client.pipeline(transaction=False)  # a server at its maxmemory refuses whatever comes in a MULTI
        pipe.execute_command("UNLINK", *map(self._keys.blob, names))
        pipe.execute_command("HDEL", self._keys.blobs(), *names)
        pipe.execute()

    # --- asking -----------------------------------------------------------------------------------------------

    def _ask_once(self, work: Callable[[Any], T]) -> T:
        """For the rollout."""
        if time.monotonic() < self._rest_until:
            raise BusError(f"Redis at {self._address} has just not answered: it is left alone for a moment")
        try:
            return self._ask(work, patience_s=0.0)
        except BusFull:
            raise
        except BusError:
            self._rest_until = time.monotonic() + _REST_S
            raise

    def _ask(self, work: Callable[[Any], T], patience_s: float = _PATIENCE_S) -> T:
        """All that is asked here may be done twice."""
        until = time.monotonic() + patience_s
        while True:
            try:
                return work(self._client)
            except AWAY as error:
                if time.monotonic() >= until:
                    raise BusError(f"Redis at {self._address} does not answer ({type(error).__name__})") from error
                time.sleep(_PAUSE_S)
            except rx.RedisError as error:
                raise self._explain(error) from error

    def _explain(self, error: rx.RedisError) -> BusError:
        text = " ".join(str(error).split())
        if isinstance(error, rx.OutOfMemoryError) or "OOM " in text:
            return BusFull(
                f"Redis at {self._address} is at its maxmemory: raise it (redis.maxmemory_mb for a run's own server), "
                "or lower hidden_states.bytes_quota"
            )
        return BusError(f"Redis at {self._address} refuses a blob: {text[:200]}")
