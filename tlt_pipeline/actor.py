"""What every process of a run has: logging, signals, bus connection, heartbeat, metrics endpoint, a clean
end.

    def main(run_dir: Path, slot: int | None) -> int:
        return run_service("rollout", slot, run_dir, rollout)

    async def rollout(actor: Actor) -> None: ...

`rollout` returns when it got Shutdown or when `actor.stopping` is set; it has `limits.drain_s` from then on.
Work that blocks for more than a few hundred ms belongs in a thread (`asyncio.to_thread`), so that heartbeats
go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions
import structlog
import uvloop

from tlt_pipeline.bus.client import Bus
from tlt_pipeline.bus.link import BusError, BusFull, redact_url
from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.failures import (
    EXIT_FAILED,
    EXIT_FATAL,
    EXIT_INTERRUPTED,
    EXIT_USER,
    Failure,
    Stopped,
    explain,
)
from tlt_pipeline.messages import EVENTS, Role, RunFailed, WorkerEvent, WorkerHeartbeat, WorkerStarted
from tlt_pipeline.processes import bind_to_launcher
from tlt_pipeline.telemetry.logging import configure_logging
from tlt_pipeline.telemetry.metrics import Metrics

_SAY_AGAIN_S = 15.0
_PROBE_FIRST_S, _PROBE_LAST_S = 0.05, 0.5


class Gauges(dict[str, float]):
    """What the next heartbeat says: lease, running, tokens_per_s, acceptance_length, policy_version,
    drafter_version. A change of `lease` sends one at once; other keys go to the metrics endpoint only."""

    def __init__(self) -> None:
        super().__init__()
        self.lease_changed = asyncio.Event()

    def __setitem__(self, key: str, value: float) -> None:
        if key == "lease" and self.get("lease") != value:
            self.lease_changed.set()
        super().__setitem__(key, value)

    def update(self, *others: Any, **values: float) -> None:  # type: ignore[override]
        for key, value in dict(*others, **values).items():
            self[key] = value


class Actor:
    """One process of a run. `slot` is None for scheduler and learner; `worker` is its name everywhere."""

    def __init__(self, role: Role, slot: int | None, run_dir: Path, stopping: asyncio.Event) -> None:
        self.role: Role = role
        self.slot = slot
        self.worker = worker_name(role, slot)
        self.run_dir = run_dir
        self.stopping = stopping
        self.gauges = Gauges()
        self.metrics = Metrics(role, slot)
        self.log: Any = structlog.get_logger()
        self.config: RunConfig
        self.run_id: str
        self.redis_url: str
        self.bus: Bus

    def stamp(self) -> dict[str, Any]:
        """The fields that every WorkerEvent has: `WorkerIdle(lease=3, **actor.stamp())`."""
        return {"slot": -1 if self.slot is None else self.slot, "worker": self.worker, "at": time.time()}

    async def emit(self, event: WorkerEvent) -> None:
        """To `worker.events`; waits while the stream is full."""

        async def append() -> bool:
            try:
                await self.bus.append(EVENTS, event)
            except BusFull:
                return False
            return True

        if not await append():
            await self.wait_for("room in worker.events (is the scheduler running?)", append)

    async def wait_for(self, what: str, probe: Callable[[], Any]) -> Any:
        """Calls `probe`, a function or coroutine function, until it gives something true, and returns that.
        Says for what it waits, at once and every 15 s. Raises Stopped when the process is asked to stop."""
        delay, say_at, began = _PROBE_FIRST_S, 0.0, time.monotonic()
        while True:
            found = probe()
            found = await found if inspect.isawaitable(found) else found
            if found:
                return found
            if self.stopping.is_set():
                raise Stopped(f"stopped while waiting for {what}")
            if time.monotonic() >= say_at:
                self.log.info(f"waiting for {what}", waited_s=round(time.monotonic() - began, 1))
                say_at = time.monotonic() + _SAY_AGAIN_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self.stopping.wait()
            delay = min(delay * 1.5, _PROBE_LAST_S)


def worker_name(role: str, slot: int | None) -> str:
    """rollout-0, learner, …: consumer name on the bus, name of the log file."""
    return role if slot is None else f"{role}-{slot}"


def run_service(role: Role, slot: int | None, run_dir: Path, main: Callable[[Actor], Awaitable[None]]) -> int:
    """`run_actor` in a uvloop of its own; the exit code."""
    return uvloop.run(run_actor(role, slot, run_dir, main))


async def run_actor(role: Role, slot: int | None, run_dir: Path, main: Callable[[Actor], Awaitable[None]]) -> int:
    """Runs `main` with everything around it; the process's exit code: 0 done or drained, 2 the user's fault,
    3 the run can't go on (RunFailed was sent in both cases), 1 anything else (a supervisor may start it
    again)."""
    configure_logging(os.environ.get("TLT_LOG_LEVEL", "info"))
    structlog.contextvars.bind_contextvars(**_context(role, slot))
    bind_to_launcher()
    stopping = asyncio.Event()
    _stop_on_signals(stopping)
    actor = Actor(role, slot, run_dir, stopping)
    try:
        async with contextlib.AsyncExitStack() as stack:
            await _enter(actor, stack)
            try:
                await _run_until_drained(actor, main)
            except Exception as error:
                failure = explain(error)
                if failure.code in (EXIT_USER, EXIT_FATAL):
                    await _announce_failure(actor, failure)
                raise
    except Stopped as stop:
        actor.log.info(str(stop))
    except Exception as error:  # noqa: BLE001 every failure becomes one logged line and an exit code
        return _report(actor, explain(error))
    actor.log.info("done")
    return 0


async def _enter(actor: Actor, stack: contextlib.AsyncExitStack) -> None:
    """Run directory, config, bus, metrics, heartbeat; waits for what isn't there yet."""
    where = actor.run_dir
    await actor.wait_for(
        f"the run directory {where} (`tlt run` or `tlt scheduler CONFIG --run-dir {where}` prepares it)",
        lambda: (where / "run_id").is_file() and (where / "config.yaml").is_file(),
    )
    actor.config = load_config(where / "config.yaml")
    if actor.slot is not None and actor.slot >= actor.config.slots.count:
        raise ConfigError(
            f"--slot {actor.slot}: this run has slots 0 to {actor.config.slots.count - 1}, raise slots.count for more"
        )
    actor.run_id = (where / "run_id").read_text().strip()
    configure_logging(os.environ.get("TLT_LOG_LEVEL", actor.config.telemetry.log_level))
    actor.redis_url = await _find_redis(actor)
    actor.bus = await Bus.connect(actor.redis_url, actor.run_id, actor.config.limits, actor.worker)
    stack.push_async_callback(actor.bus.close)
    endpoint = actor.metrics.serve(actor.config.telemetry, actor.role, actor.slot)
    stack.callback(actor.metrics.close)
    actor.log.info("started", run=actor.run_id, pid=os.getpid(), metrics=endpoint)
    if actor.role == "scheduler":
        return  # the reader of worker.events writes none to itself
    await actor.emit(WorkerStarted(role=actor.role, **actor.stamp()))
    beating = asyncio.create_task(_beat(actor), name="heartbeat")
    stack.push_async_callback(_cancel, beating)


async def _find_redis(actor: Actor) -> str:
    """The URL of this run's Redis, once it answers. A launcher or an operator says it in $REDIS_URL; `tlt
    run` also leaves it in the run directory."""
    note = actor.run_dir / "redis_url"

    def known() -> str | None:
        noted = note.read_text().strip() if note.is_file() else None
        return os.environ.get("REDIS_URL") or actor.config.redis.url or noted

    url = await actor.wait_for("a Redis: set REDIS_URL, or redis.url in the config", known)

    await actor.wait_for(f"Redis at {redact_url(url)}", lambda: _is_someone_there(url))
    return url


async def _is_someone_there(url: str) -> bool:
    """Whether connecting is worth it: a server that answers, or a reason that waiting won't mend."""
    try:
        factory: Any = redis.asyncio.Redis
        client = factory.from_url(url, socket_connect_timeout=2, socket_timeout=2)
    except ValueError:
        return True
    try:
        await client.ping()
    except redis.exceptions.AuthenticationError:
        return True
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
        return False
    finally:
        await client.aclose()
    return True


async def _run_until_drained(actor: Actor, main: Callable[[Actor], Awaitable[None]]) -> None:
    """`main`, which is cancelled when it isn't back `limits.drain_s` after the process was asked to stop."""
    work = asyncio.ensure_future(main(actor))
    stop = asyncio.create_task(actor.stopping.wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            actor.log.info("draining", seconds=actor.config.limits.drain_s)
            await asyncio.wait({work}, timeout=actor.config.limits.drain_s)
        if not work.done():
            raise Stopped(f"not drained within {actor.config.limits.drain_s:g} s, cut short")
        await work
    finally:
        await _cancel(stop)
        await _cancel(work)


async def _beat(actor: Actor) -> None:
    """Heartbeats, at once when the lease changes. A full stream or a Redis that is away costs heartbeats, not
    the work: both are counted."""
    while True:
        for name, value in actor.gauges.items():
            actor.metrics.set(name, value)
        try:
            await actor.bus.append(EVENTS, _heartbeat(actor))
        except BusFull:
            actor.metrics.count_skipped("heartbeat_stream_full")
        except BusError as error:
            actor.metrics.count_skipped("heartbeat_no_redis")
            actor.log.warning("heartbeat not sent", reason=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(actor.config.limits.heartbeat_s):  # wait_for of 3.11 may lose a cancel
                await actor.gauges.lease_changed.wait()
        actor.gauges.lease_changed.clear()


def _heartbeat(actor: Actor) -> WorkerHeartbeat:
    known = {
        name: float(value) if name in ("tokens_per_s", "acceptance_length") else int(value)
        for name, value in actor.gauges.items()
        if name in WorkerHeartbeat.model_fields
    }
    return WorkerHeartbeat.model_validate({"role": actor.role, **actor.stamp(), **known})


async def _announce_failure(actor: Actor, failure: Failure) -> None:
    try:
        await actor.bus.append(
            EVENTS, RunFailed(reason=f"{actor.worker}: {failure.line}", code=failure.code, **actor.stamp())
        )
    except BusError as error:
        actor.log.error("the others could not be told of the failure", reason=str(error))


def _report(actor: Actor, failure: Failure) -> int:
    """The last line of the log: the supervisor reads `reason` from it."""
    if failure.expected:
        actor.log.error("failed", reason=failure.line, code=failure.code)
    else:
        actor.log.exception("failed", reason=failure.line, code=failure.code)
    return failure.code or EXIT_FAILED


def _stop_on_signals(stopping: asyncio.Event) -> None:
    """SIGTERM and SIGINT: drain; a second one: end now. Plain handlers, not the loop's: they must work while
    the loop is inside a long tensor operation."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        if seen:
            os._exit(EXIT_INTERRUPTED)
        seen.append(number)
        loop.call_soon_threadsafe(stopping.set)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def _context(role: str, slot: int | None) -> dict[str, Any]:
    return {"role": role} if slot is None else {"role": role, "slot": slot}


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Ends a task and waits until it has ended; its own failure was or will be seen by whoever awaits it."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
