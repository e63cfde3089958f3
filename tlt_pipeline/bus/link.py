"""The connection to Redis: opened with a clear refusal, kept through a server's restart, never retried by
redis-py.

redis-py's own retries would repeat a write whose reply was lost. Here they are off; `Link` repeats a call
while the server is away, for a bounded time, and everything that goes through it is harmless when repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis.asyncio
import structlog
from redis import exceptions as rx
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tlt_pipeline.bus.probe import AWAY, BusError, BusFull, RedisUnusable, probe, redact_url, refused
from tlt_pipeline.bus.scripts import Script

__all__ = ["BusError", "BusFull", "Link", "MissingGroup", "RedisUnusable", "redact_url"]

SOCKET_TIMEOUT_S = 30.0
_log: Any = structlog.get_logger("tlt.bus")


class MissingGroup(BusError):
    """The stream or its consumer group isn't there: never made, or forgotten by the server."""


class Link:
    """A pool of connections to one server. `losses` grows each time a call found it away."""

    def __init__(self, client: Any, address: str, patience_s: float) -> None:
        self._client = client
        self._address = address
        self._patience_s = patience_s
        self._lost_at: float | None = None
        self.losses = 0

    @classmethod
    async def open(cls, url: str, *, connect_timeout_s: float, patience_s: float) -> Link:
        """Raises RedisUnusable: malformed URL, unreachable for `connect_timeout_s`, refused, older than
        7.0."""
        await asyncio.to_thread(probe, url, connect_timeout_s)
        return cls(_client(url), redact_url(url), patience_s)

    async def close(self) -> None:
        await self._client.aclose()

    async def call(self, *command: bytes | str | int) -> Any:
        """One command, its reply as RESP2 gives it. Raises BusError when Redis stays away or refuses."""
        return await self._persist(lambda: self._send(command))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[bytes | str | int]) -> Any:
        """One script; loaded again where the server doesn't know it."""

        async def evaluate() -> Any:
            try:
                return await self._send(("EVALSHA", script.sha, len(keys), *keys, *args))
            except rx.NoScriptError:
                return await self._send(("EVAL", script.source, len(keys), *keys, *args))

        return await self._persist(evaluate)

    async def _send(self, command: Sequence[bytes | str | int]) -> Any:
        async with asyncio.timeout(SOCKET_TIMEOUT_S):
            return await self._client.execute_command(*command)

    async def _persist(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        first_loss: float | None = None
        delay = 0.05
        while True:
            try:
                reply = await attempt()
            except (rx.AuthenticationError, rx.AuthorizationError, rx.InvalidResponse) as error:
                raise refused(self._address, error) from None
            except AWAY as error:
                self._note_loss(error)
                first_loss = first_loss or time.monotonic()
                if time.monotonic() - first_loss >= self._patience_s:
                    raise BusError(
                        f"Redis at {self._address} has not answered for {self._patience_s:.0f} s: see "
                        "whether it still runs, then go on with --resume"
                    ) from error
                await asyncio.sleep(delay)
                delay = min(2 * delay, 1.0)
            except rx.ResponseError as error:
                raise _translate(self._address, error) from error
            else:
                self._note_return()
                return reply

    def _note_loss(self, error: Exception) -> None:
        self.losses += 1
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            _log.warning(
                "redis does not answer, trying again",
                redis=self._address,
                for_at_most_s=self._patience_s,
                error=type(error).__name__,
            )

    def _note_return(self) -> None:
        if self._lost_at is not None:
            away_s = round(time.monotonic() - self._lost_at, 2)
            self._lost_at = None
            _log.info("redis answers again", redis=self._address, away_s=away_s)


def _client(url: str) -> Any:
    factory: Any = redis.asyncio.Redis
    client = factory.from_url(
        url,
        protocol=2,
        decode_responses=False,
        retry=Retry(NoBackoff(), 0),
        # The limit is `_send`'s. redis-py would keep it with asyncio.wait_for, which on Python 3.11 loses a cancel
        # that arrives while a write ends: 1 of 10 in a busy reader, whose process then never ended.
        socket_timeout=None,
        socket_connect_timeout=5.0,
        max_connections=512,
        driver_info=None,  # no CLIENT SETINFO: an access list may forbid it
    )
    client.response_callbacks.clear()  # replies stay as RESP2 gives them, whatever redis-py makes of them
    return client


def _translate(address: str, error: rx.ResponseError) -> BusError:
    text = " ".join(str(error).split())
    if isinstance(error, rx.OutOfMemoryError) or "OOM " in text:
        return BusFull(
            f"Redis at {address} is at its maxmemory: raise redis.maxmemory_mb (its own server), or lower "
            "limits.queue_length"
        )
    if "MISCONF" in text:
        return BusError(f"Redis at {address} can't write to its disk: free some space there, then go on with --resume")
    if "NOGROUP" in text:
        return MissingGroup(text)
    return BusError(f"Redis at {address} refuses a command: {text[:200]}")
