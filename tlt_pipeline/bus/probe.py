"""What makes a Redis usable: it answers, lets us in, is new enough and evicts nothing; else one line with the
remedy.

No address with a password gets into a message from here.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import redis
from redis import exceptions as rx
from redis.backoff import NoBackoff
from redis.retry import Retry

OLDEST_VERSION = (7, 0)
REFUSALS = (rx.AuthenticationError, rx.AuthorizationError, rx.ResponseError, rx.InvalidResponse)
AWAY = (rx.ConnectionError, rx.TimeoutError, OSError)


class BusError(RuntimeError):
    """Something went wrong with Redis; one line with the remedy."""


class BusFull(BusError):
    """A stream is at `limits.queue_length`, or the server's memory is full: nothing was sent, the caller
    waits or gives up."""


class RedisUnusable(BusError, ValueError):
    """The Redis that was named can't be used: unreachable, too old, refuses us. One line with the remedy."""


def redact_url(url: str) -> str:
    """The address without user, password and query, fit for logs and errors."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(malformed URL)"
    return f"{parts.scheme}://{host}{port}{parts.path}"


def probe(url: str, timeout_s: float) -> str:
    """Waits up to `timeout_s` for the server; its name and version. Blocks. Raises RedisUnusable."""
    address = redact_url(url)
    deadline = time.monotonic() + timeout_s
    client = connect(url, address, connect_timeout_s=2.0, timeout_s=5.0)
    try:
        while True:
            try:
                return check_server(client.execute_command("INFO"), address)
            except REFUSALS as error:
                raise refused(address, error) from None
            except AWAY as error:
                if time.monotonic() > deadline:
                    raise unreachable(address, timeout_s, error) from None
                time.sleep(0.1)
    finally:
        client.close()


def connect(url: str, address: str, *, connect_timeout_s: float, timeout_s: float) -> Any:
    """A client that blocks, repeats nothing, and leaves replies as RESP2 gives them. Raises RedisUnusable: malformed
    URL."""
    factory: Any = redis.Redis
    try:
        client = factory.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout_s,
            socket_connect_timeout=connect_timeout_s,
            driver_info=None,
        )
    except (ValueError, TypeError):
        raise malformed(address) from None
    client.response_callbacks.clear()
    return client


def check_server(info: bytes, address: str) -> str:
    """The server's name and version from what INFO says. Raises RedisUnusable: older than 7.0 (a Valkey names
    a Redis version too), or one that drops keys when its memory is full."""
    lines = info.decode("utf-8", "replace").splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    version = facts.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_VERSION:
        raise RedisUnusable(
            f"Redis {version} at {address} is too old, 7.0 is the oldest that works: upgrade it, or unset "
            "redis.url and REDIS_URL for a server of the run's own (pip install 'tlt-pipeline[redis-server]')"
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys"):
        raise RedisUnusable(
            f"Redis at {address} drops work when its memory is full (maxmemory-policy {policy}): set it to noeviction"
        )
    return f"Valkey {facts['valkey_version']}" if "valkey_version" in facts else f"Redis {version}"


def malformed(address: str) -> RedisUnusable:
    """Without the cause, whose text may quote the password."""
    return RedisUnusable(
        f"{address} is no Redis address: give redis.url or REDIS_URL as redis://host:port/0, "
        "rediss://host:port/0 or unix:///path/to/redis.sock"
    )


def refused(address: str, error: Exception) -> RedisUnusable:
    if isinstance(error, rx.InvalidResponse):
        return RedisUnusable(f"what answers at {address} is no Redis: correct redis.url or REDIS_URL")
    return RedisUnusable(
        f"Redis at {address} refuses this client ({_text(error)}): give user and password in "
        "REDIS_URL as redis://user:password@host:port/0"
    )


def unreachable(address: str, timeout_s: float, error: Exception) -> RedisUnusable:
    return RedisUnusable(
        f"no Redis answers at {address} within {timeout_s:g} s ({_text(error)}): start one there, "
        "correct redis.url or REDIS_URL, or unset both for a server of the run's own"
    )


def _text(error: Exception) -> str:
    """redis-py names host and port in its errors, and no password."""
    return " ".join(str(error).split())[:160] or type(error).__name__
