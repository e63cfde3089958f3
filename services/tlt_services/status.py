"""Where a run stands: the scheduler's picture of it in Redis, read without disturbing anyone. `tlt status`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import redis
import typer
from redis.backoff import NoBackoff
from redis.retry import Retry
from rich.console import Console

from tlt_pipeline.bus.streams import Keys
from tlt_pipeline.config import ConfigError, load_config
from tlt_pipeline.failures import EXIT_FAILED
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.scheduling.spot import spot_facts
from tlt_pipeline.scheduling.state import Account
from tlt_pipeline.scheduling.status import STATUS_KEY, RunStatus
from tlt_pipeline.telemetry.report import print_summary, spot_rows
from tlt_services.progress import render_status
from tlt_services.run_log import read_records

_RUNS = Path("runs")
_STALE_S = 10.0
_AWAY = (redis.RedisError, OSError)


class StatusReader:
    """One GET a call. `last_answer`: when Redis last answered (monotonic)."""

    def __init__(self, url: str, run_id: str) -> None:
        self._client: Any = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            url, socket_timeout=2.0, socket_connect_timeout=2.0, retry=Retry(NoBackoff(), 0)
        )
        self._key = Keys(run_id).state(STATUS_KEY)
        self.last_answer = time.monotonic()

    def read(self) -> RunStatus | None:
        """None: nothing said yet, or Redis doesn't answer."""
        try:
            body = self._client.get(self._key)
        except _AWAY:
            return None  # the caller looks at last_answer
        self.last_answer = time.monotonic()
        return None if body is None else RunStatus.model_validate_json(body)

    def close(self) -> None:
        self._client.close()


def show(run_dir: Path | None, *, as_json: bool) -> int:
    """Prints the run's status and what idle slots did in the steps done, or the summary of a run that is over. Raises
    ConfigError, RunDirError, StorageError."""
    run = RunDir(run_dir or newest_run())
    run_id = run.run_id()
    status = _read_once(_redis_of(run), run_id)
    summary: dict[str, Any] | None = json.loads(run.summary.read_text()) if run.summary.is_file() else None
    spot = spot_facts(list(read_records(run).values()), Account())
    if as_json:
        content = status.model_dump() if status else {"run": run_id, "phase": "finished" if summary else "stopped"}
        typer.echo(json.dumps({**content, "spot": spot, "summary": summary}))
        return 0 if status or summary else EXIT_FAILED
    console = Console()
    if status is not None and status.phase != "finished":
        console.print(render_status(status))
        for label, told in spot_rows(spot) if status.step else []:
            console.print(f"{label:<13} {told}", soft_wrap=True, highlight=False)
        age = time.time() - status.at
        if age > _STALE_S:
            console.print(f"said {age:.0f} s ago: the scheduler is not running; tlt run --resume {run.root}")
        return 0
    if summary is not None:
        print_summary(summary, run.root, console)
        return 0
    typer.echo(f"{run.root} is not running and not finished: go on with `tlt run --resume {run.root}`", err=True)
    return EXIT_FAILED


def newest_run() -> Path:
    found = [path.parent for path in _RUNS.glob("*/run_id")]
    if not found:
        raise ConfigError(f"no run in {_RUNS.absolute()}: name a run directory")
    return max(found, key=lambda path: (path / "run_id").stat().st_mtime)


def _redis_of(run: RunDir) -> str | None:
    """The URL that the run's launcher noted, else what a service started by hand would take."""
    if run.redis_url.is_file():
        return run.redis_url.read_text().strip()
    config = load_config(run.config) if run.config.is_file() else None
    return os.environ.get("REDIS_URL") or (config.redis.url if config else None)


def _read_once(url: str | None, run_id: str) -> RunStatus | None:
    if url is None:
        return None
    reader = StatusReader(url, run_id)
    try:
        return reader.read()
    finally:
        reader.close()
