"""`tlt run`: all processes of a run on this machine, from its run directory to its summary.

Consumes: the config, the scheduler's status in Redis, signals. Publishes: the run directory, progress, the summary.
Waits for: the scheduler's end. Unblocked by: a child's end, Ctrl-C, time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import structlog
import typer
from rich.console import Console

from tlt_pipeline.bus.probe import redact_url
from tlt_pipeline.bus.server import RedisServer, find_or_start_redis
from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.failures import EXIT_FAILED, EXIT_INTERRUPTED
from tlt_pipeline.processes import adopt_orphans
from tlt_pipeline.rundir import RunDir, StorageError
from tlt_pipeline.telemetry.logging import configure_logging
from tlt_pipeline.telemetry.report import print_summary
from tlt_services.leftovers import holding_shards, sole_launcher
from tlt_services.preparation import check_models, default_root, is_prepared, make_run, note_redis, resume_run
from tlt_services.progress import LiveTable, Progress, StepLines
from tlt_services.status import StatusReader
from tlt_services.supervisor import RunEnded, Supervisor, services_of
from tlt_services.wakeup import Wakeup

_LOOK_S = 1.0
"""Between two looks at status and Redis: the launcher shares its cores with the training."""
_END_GRACE_S = 2.0
_CUT_SHORT_S = 1.0
"""A service that isn't drained within limits.drain_s cuts its work short itself, and gets so long for that."""

_log: Any = structlog.get_logger()


def launch(config: Path | None, overrides: list[str], run_dir: Path | None, *, resume: bool) -> int:
    """Runs to the end; the exit code. Raises ConfigError, RunDirError, RedisUnusable, RunEnded, …"""
    configure_logging()
    settings, run = _prepare(config, overrides, run_dir, resume=resume)
    configure_logging(settings.telemetry.log_level)
    if resume and _finished_steps(run) >= settings.steps:
        _log.info("this run is finished", steps=settings.steps)
        return _conclude(run)
    adopt_orphans()
    with sole_launcher(run), holding_shards(settings, run), Wakeup() as wakeup:
        server = find_or_start_redis(settings.redis, run.redis)
        launcher = Launcher(settings, run, server, wakeup)
        try:
            code = launcher.run_services()
        finally:
            launcher.close()
    return _conclude(run) if code == 0 else code


def _prepare(
    config: Path | None, overrides: list[str], run_dir: Path | None, *, resume: bool
) -> tuple[RunConfig, RunDir]:
    if config is None and not (resume and run_dir):
        raise ConfigError("say what to run: tlt run CONFIG, or tlt run --resume RUN_DIR")
    if config is not None and config.is_dir():
        if not resume:
            raise ConfigError(f"{config} is a directory: to go on with the run in it, tlt run --resume {config}")
        return resume_run(None, overrides, config)
    if config is None:
        assert run_dir is not None
        return resume_run(None, overrides, run_dir)
    settings = load_config(config, overrides)
    root = run_dir or default_root(settings)
    if resume and is_prepared(root):
        return resume_run(config, overrides, root)
    check_models(settings)
    return settings, make_run(settings, root, fresh=True)


class Launcher:
    """One run's processes, from first start to the last one's end."""

    def __init__(self, config: RunConfig, run: RunDir, server: RedisServer, wakeup: Wakeup) -> None:
        self._config, self._run, self._server, self._wakeup = config, run, server, wakeup
        self._reader = StatusReader(server.url, run.run_id())
        self._supervisor = Supervisor(config, run.root, server.url, keep=_pids(server))
        self._summary_before = _modified(run.summary)
        self._redis_restarts = 0

    def run_services(self) -> int:
        """0: the run is complete. 128 + signal: stopped and drained. Raises RunEnded."""
        note_redis(self._server.url, self._run)
        _log.info("run starts", run_dir=str(self._run.root), redis=redact_url(self._server.url))
        self._supervisor.start(services_of(self._config))
        try:
            with self._progress() as progress:
                is_complete = self._watch(progress)
        except (RunEnded, StorageError):
            self._supervisor.stop(self._config.limits.drain_s + _CUT_SHORT_S, self._sleep)
            raise
        if is_complete:
            late = self._supervisor.finish(self._config.limits.drain_s + _END_GRACE_S, self._sleep)
            if late:
                _log.warning("services did not end with the run, killed", services=late)
            return 0
        return self._stop()

    def close(self) -> None:
        """No process of the run is left after this."""
        self._supervisor.kill()
        self._reader.close()
        if self._server.owned:
            self._run.redis_url.unlink(missing_ok=True)
        self._server.close()

    def _watch(self, progress: Progress) -> bool:
        """Until the run is complete (True) or is to be stopped."""
        look_at = 0.0
        while not self._wakeup.stops:
            if self._supervisor.check(self._is_complete):
                return True
            if time.monotonic() >= look_at:
                self._look_at_redis()
                progress.update(self._reader.read())
                look_at = time.monotonic() + _LOOK_S
            self._wakeup.wait(look_at - time.monotonic())
        return False

    def _stop(self) -> int:
        """Drains; a second signal kills."""
        cause, drain_s = self._wakeup.stopped_by, self._config.limits.drain_s
        self._wakeup.stops = 0
        _log.info("stopping: services finish what they hold; once more kills them", within_s=drain_s)
        status = self._reader.read()
        late = self._supervisor.stop(drain_s + _CUT_SHORT_S, self._sleep)
        killed = self._wakeup.stops > 0
        if late and not killed:
            _log.warning("services were not drained in time, killed", services=late)
        done = f"after step {status.step} of {status.steps}" if status else "before the first step"
        typer.echo(f"stopped {done}; go on with: tlt run --resume {self._run.root}", err=True)
        return EXIT_INTERRUPTED if killed or cause is None else 128 + int(cause)

    def _sleep(self, seconds: float) -> bool:
        self._wakeup.wait(seconds)
        return self._wakeup.stops == 0

    def _is_complete(self) -> bool:
        return _modified(self._run.summary) != self._summary_before

    def _progress(self) -> Progress:
        if sys.stderr.isatty():
            return LiveTable(self._run.metrics, Console(stderr=True))
        return StepLines(self._run.metrics)

    def _look_at_redis(self) -> None:
        """Starts the run's own Redis again where it died; its log of writes brings the state back."""
        if self._server.revive():
            self._redis_restarts += 1
            self._supervisor.keep = _pids(self._server)
            if self._redis_restarts > self._config.limits.max_restarts:
                raise RunEnded(f"the run's Redis keeps ending: see {self._run.redis / 'redis.log'}", EXIT_FAILED)
        silent_s = time.monotonic() - self._reader.last_answer
        if silent_s > 4 * self._config.limits.worker_timeout_s:
            raise RunEnded(
                f"Redis at {redact_url(self._server.url)} has not answered for {silent_s:.0f} s: bring it back, "
                f"then tlt run --resume {self._run.root}",
                EXIT_FAILED,
            )


def _conclude(run: RunDir) -> int:
    print_summary(json.loads(run.summary.read_text()), run.root, Console())
    return 0


def _finished_steps(run: RunDir) -> int:
    return int(json.loads(run.summary.read_text())["steps"]) if run.summary.is_file() else 0


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _pids(server: RedisServer) -> frozenset[int]:
    return frozenset() if server.pid is None else frozenset({server.pid})
