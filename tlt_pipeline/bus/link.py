"""The connection to Redis: opened with a clear refusal, kept through a server's restart, never retried by redis-py.

redis-py's own retries would repeat a write whose reply was lost. Here they are off; `Link` repeats a call while the
server is away, for a bounded time, and everything that goes through it is written to be harmless when repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog
from redis import exceptions as rx
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tlt_pipeline.bus.scripts import Script

OLDEST_VERSION = (7, 0)
SOCKET_TIMEOUT_S = 30.0
_AWAY = (rx.ConnectionError, rx.TimeoutError, OSError)

_log = structlog.get_logger("tlt.bus")


class BusError(RuntimeError):
    """Something went wrong with Redis; one line with the remedy."""


class BusFull(BusError):
    """A stream is at `limits.queue_length`, or the server's memory is: the caller waits or gives up, nothing was
    sent."""


class RedisUnusable(BusError, ValueError):
    """The Redis that was named can't be used: unreachable, too old, wrong password. One line with the remedy."""


def redact_url(url: str) -> str:
    """The address without user, password and query, fit for logs and errors."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(malformed URL)"
    return f"{parts.scheme}://{host}{port}{parts.path}"


class Link:
    """A pool of connections to one server. `losses` grows each time a call found it away."""

    def __init__(self, client: Redis, address: str, patience_s: float) -> None:
        self._client = client
        self._address = address
        self._patience_s = patience_s
        self._lost_at: float | None = None
        self.losses = 0

    @classmethod
    async def open(cls, url: str, name: str, *, connect_timeout_s: float, patience_s: float) -> Link:
        """Raises RedisUnusable: malformed URL, unreachable for `connect_timeout_s`, refused, older than 7.0."""
        address = redact_url(url)
        link = cls(_client(url, address, name), address, patience_s)
        try:
            await link._check(connect_timeout_s)
        except BaseException:
            await link.close()
            raise
        return link

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
        return await self._client.execute_command(*command)

    async def _persist(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        started = time.monotonic()
        delay = 0.05
        while True:
            try:
                reply = await attempt()
            except rx.AuthenticationError as error:
                raise _refusal(self._address, error) from None
            except _AWAY as error:
                self._note_loss(error)
                if time.monotonic() - started > self._patience_s:
                    raise BusError(
                        f"Redis at {self._address} has not answered for {self._patience_s:.0f} s: "
                        "see whether it still runs, then start again with --resume"
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

    async def _check(self, connect_timeout_s: float) -> None:
        deadline = time.monotonic() + connect_timeout_s
        while True:
            try:
                info: bytes = await asyncio.wait_for(self._send(("INFO", "server")), connect_timeout_s)
                break
            except (rx.AuthenticationError, rx.NoPermissionError) as error:
                raise _refusal(self._address, error) from None
            except (*_AWAY, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise RedisUnusable(
                        f"no Redis at {self._address} within {connect_timeout_s:g} s ({type(error).__name__}): start "
                        "one there, correct redis.url or REDIS_URL, or leave both unset for a server of the run's own"
                    ) from None
                await asyncio.sleep(0.1)
            except rx.ResponseError as error:
                raise _refusal(self._address, error) from None
        check_version(info, self._address)


def check_version(info: bytes, address: str) -> None:
    """Raises RedisUnusable unless INFO names Redis 7.0 (or a Valkey, which names a Redis version too) or newer."""
    lines = dict(line.split(":", 1) for line in info.decode("utf-8", "replace").splitlines() if ":" in line)
    version = lines.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_VERSION:
        raise RedisUnusable(
            f"Redis {version} at {address} is too old, 7.0 is the oldest that works: upgrade it, or unset redis.url "
            "and REDIS_URL for a server of the run's own (pip install 'tlt-pipeline[redis-server]')"
        )


def _client(url: str, address: str, name: str) -> Redis:
    try:
        client: Redis = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            url,
            protocol=2,
            decode_responses=False,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            client_name=name,
            driver_info=None,
        )
    except (ValueError, TypeError):
        # The cause's text may quote the password.
        raise RedisUnusable(
            f"{address} is no Redis address: give redis.url or REDIS_URL as redis://host:port/0, rediss://… or "
            "unix:///path/to.sock"
        ) from None
    client.response_callbacks.clear()  # replies stay as RESP2 gives them, whatever redis-py makes of them
    return client


def _refusal(address: str, error: Exception) -> RedisUnusable:
    return RedisUnusable(
        f"Redis at {address} refuses this client ({type(error).__name__}): give user and password in REDIS_URL as "
        "redis://user:password@host:port/0"
    )


def _translate(address: str, error: rx.ResponseError) -> Exception:
    text = str(error)
    if "OOM" in text or isinstance(error, rx.OutOfMemoryError):
        return BusFull(
            f"Redis at {address} is at its maxmemory: raise redis.maxmemory_mb, or lower limits.queue_length"
        )
    if "NOGROUP" in text:
        return error
    return BusError(f"Redis at {address} refuses a command: {' '.join(text.split())[:200]}")
