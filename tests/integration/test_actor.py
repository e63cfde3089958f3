"""The life of a process over a real Redis: what it says, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from tests.integration.conftest import server_binaries, wait_until
from tests.tiny import tiny_settings
from tlt_pipeline.bus.server import Binary, start_redis
from tlt_pipeline.bus.streams import Keys
from tlt_pipeline.config import RedisConfig
from tlt_pipeline.messages import EVENTS, AnyMessage, RunFailed, WorkerHeartbeat, WorkerStarted, decode
from tlt_services.preparation import is_prepared

PROGRAM = """
    import asyncio, sys
    from pathlib import Path
    from tlt_pipeline.actor import Actor, run_service
    from tlt_pipeline.config import ConfigError
    from tlt_pipeline.failures import RunFatal

    async def main(actor: Actor) -> None:
        {body}

    sys.exit(run_service({role!r}, {slot!r}, Path(sys.argv[1]), main))
"""


@dataclass
class Started:
    process: subprocess.Popen[bytes]
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def said(self, event: str) -> dict[str, Any] | None:
        return next((line for line in self.lines() if event in line["event"]), None)


Start = Callable[..., Started]


@pytest.fixture(scope="module")
def redis_binary() -> Binary:
    """One kind of server is enough here."""
    return Binary(next(iter(server_binaries().values())), "")


@pytest.fixture(scope="module")
def redis_url(redis_binary: Binary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(redis_binary, RedisConfig(maxmemory_mb=256), tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    settings = tiny_settings(tmp_path, limits__heartbeat_s=0.1, limits__drain_s=0.5)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "run_id").write_text(f"test-{uuid.uuid4().hex[:8]}\n")
    return tmp_path


@pytest.fixture
def start(run_dir: Path, redis_url: str) -> Iterator[Start]:
    """`start(body, role, slot)`: a process whose main has this body."""
    started: list[Started] = []

    def begin(body: str, role: str = "rollout", slot: int | None = 1, **environment: str) -> Started:
        code = textwrap.dedent(PROGRAM).format(body=body, role=role, slot=slot)
        log = run_dir / f"log-{len(started)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(run_dir)],
                stderr=file,
                env={**os.environ, "REDIS_URL": redis_url, **environment},
            )
        started.append(Started(process, log))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def events(run_dir: Path, raw: redis.Redis) -> Callable[[], list[AnyMessage]]:
    key = Keys((run_dir / "run_id").read_text().strip()).stream(EVENTS)
    return lambda: [decode(fields[b"b"]) for _, fields in raw.xrange(key)]


async def test_it_starts_beats_and_drains(start: Start, events: Callable[[], list[AnyMessage]]) -> None:
    body = "actor.gauges.update(lease=7, tokens_per_s=2.5); await actor.stopping.wait()"
    started = start(body)
    await wait_until(lambda: len(events()) >= 3)
    first, beat = events()[:2]
    assert isinstance(first, WorkerStarted)
    assert (first.role, first.slot, first.worker) == ("rollout", 1, "rollout-1")
    assert isinstance(events()[2], WorkerHeartbeat) and isinstance(beat, WorkerHeartbeat)
    assert any(isinstance(e, WorkerHeartbeat) and (e.lease, e.tokens_per_s) == (7, 2.5) for e in events())
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(10) == 0
    assert started.said("done")


async def test_a_new_lease_is_said_at_once(start: Start, events: Callable[[], list[AnyMessage]], run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tiny_settings(run_dir, limits__heartbeat_s=60.0)))
    start("await asyncio.sleep(0.3); actor.gauges['lease'] = 9; await actor.stopping.wait()")
    await wait_until(lambda: any(isinstance(event, WorkerHeartbeat) and event.lease == 9 for event in events()))


ENDS = [
    ("return", 0, None, "done"),
    ("raise ConfigError('no such model: fetch it')", 2, 2, "no such model: fetch it"),
    ("raise RunFatal('the loss is NaN: lower learner.lr')", 3, 3, "the loss is NaN: lower learner.lr"),
    ("raise OSError(28, 'No space left on device', '/full')", 3, 3, "no space left on the disk (/full)"),
    ("raise KeyError('bug')", 1, None, "unexpected KeyError: 'bug'"),
    ("raise ExceptionGroup('tasks', [ValueError('x'), RunFatal('deep down')])", 3, 3, "deep down"),
]


@pytest.mark.parametrize(("body", "code", "announced", "reason"), ENDS, ids=[body[:30] for body, *_ in ENDS])
async def test_every_end_has_its_code_and_reason(
    start: Start,
    events: Callable[[], list[AnyMessage]],
    body: str,
    code: int,
    announced: int | None,
    reason: str,
) -> None:
    started = start(body)
    assert started.process.wait(20) == code
    last = started.lines()[-1]
    assert reason in last.get("reason", last["event"])
    failed = [event for event in events() if isinstance(event, RunFailed)]
    assert [event.code for event in failed] == ([] if announced is None else [announced])
    assert all(event.reason.startswith("rollout-1: ") for event in failed)
    assert ("exception" in last) is (code == 1)


async def test_a_main_that_does_not_drain_is_cut_short(start: Start) -> None:
    started = start("await asyncio.sleep(600)")
    await wait_until(lambda: started.said("started"))
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(10) == 0
    assert started.said("not drained within 0.5 s")


async def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    started = start("await actor.stopping.wait(); actor.log.info('slow'); await asyncio.sleep(600)")
    await wait_until(lambda: started.said("started"))
    started.process.send_signal(signal.SIGINT)
    await wait_until(lambda: started.said("slow"))
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(10) == 130


async def test_it_waits_for_run_directory_and_redis_and_says_so(
    start: Start, run_dir: Path, events: Callable[[], list[AnyMessage]], redis_url: str
) -> None:
    """In any start order: first no directory, then no Redis; then all goes on by itself."""
    config = (run_dir / "config.yaml").rename(run_dir / "later.yaml")
    started = start("await actor.stopping.wait()", REDIS_URL="")
    await wait_until(lambda: started.said("waiting for the run directory"))
    config.rename(run_dir / "config.yaml")
    assert is_prepared(run_dir)
    await wait_until(lambda: started.said("waiting for a Redis: set REDIS_URL"))
    (run_dir / "redis_url").write_text(f"{redis_url}\n")
    await wait_until(lambda: started.said("started"))
    assert isinstance(events()[0], WorkerStarted)


async def test_waiting_can_be_stopped(start: Start, run_dir: Path) -> None:
    started = start("await actor.stopping.wait()", REDIS_URL="redis://user:secret@127.0.0.1:1/0")
    await wait_until(lambda: started.said("waiting for Redis at redis://127.0.0.1:1/0"))
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(10) == 0
    assert "secret" not in started.log.read_text()


async def test_a_slot_that_the_run_does_not_have_is_refused(start: Start) -> None:
    started = start("return", slot=2)
    assert started.process.wait(20) == 2
    assert "slots.count" in started.lines()[-1]["reason"]


async def test_metrics_are_served_on_this_machine_only(start: Start, run_dir: Path, free_port: int) -> None:
    settings = tiny_settings(run_dir, telemetry__metrics_port=free_port)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    body = "actor.metrics.drafts.inc(3); actor.gauges['running'] = 4; await actor.stopping.wait()"
    started = start(body, "scheduler", None)
    await wait_until(lambda: started.said("started"))
    said = started.said("started")
    assert said is not None and said["metrics"] == f"http://127.0.0.1:{free_port}/metrics"

    def served() -> str:
        with urllib.request.urlopen(said["metrics"], timeout=5) as reply:
            return reply.read().decode()

    assert 'tlt:spec_decode_num_drafts_total{role="scheduler",slot=""} 3.0' in served()
    second = start("return", "scheduler", None)
    assert second.process.wait(20) == 2
    assert "set telemetry.metrics_port to a free range" in second.lines()[-1]["reason"]
