"""`tlt run` with everything real: Redis, four kinds of processes, a tiny random policy, a run of a few steps."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from safetensors.numpy import load_file, save_file

from tests.tiny import write_tiny_config
from tlt_pipeline.bus import Bus
from tlt_pipeline.bus.journal import read_journal
from tlt_pipeline.bus.server import find_binary, start_redis
from tlt_pipeline.config import LimitsConfig, RedisConfig, load_config
from tlt_pipeline.messages import REQUESTS, Array, RolloutRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass
class Run:
    """Processes of one run directory, started here."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    started: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    @property
    def root(self) -> Path:
        return self.folder / "run"

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def tlt(self, *arguments: str) -> subprocess.Popen[bytes]:
        kept = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "TLT_RUN_DIR")}
        with (self.folder / "stdout").open("ab") as out, (self.folder / "stderr").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tlt_services.cli", *arguments],
                cwd=self.folder,
                env={**kept, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )
        self.started.append(process)
        return process

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        return self.tlt("run", "tiny.yaml", *overrides, "--run-dir", str(self.root))

    def summary(self) -> dict[str, Any]:
        return json.loads((self.root / "summary.json").read_text())

    def log(self, name: str) -> str:
        path = self.root / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def steps(self) -> int:
        path = self.root / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def processes(self, needle: str = "") -> list[psutil.Process]:
        """Every living process that works for this run directory, whoever its parent is now."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                about = " ".join([*process.cmdline(), process.environ().get("TLT_RUN_DIR", "")])
                if str(self.root) in about and needle in about and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "tiny.yaml").write_text(template.read_text())
    one = Run(tmp_path)
    yield one
    run_id = (one.root / "run_id").read_text().strip()
    for process in one.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    await_true(lambda: not one.processes(), 10)
    shutil.rmtree(Path("/dev/shm") / f"tlt-{run_id}", ignore_errors=True)  # a killed launcher leaves these
    (Path("/dev/shm") / f"tlt-{run_id}.run").unlink(missing_ok=True)


def await_true(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def test_a_run_completes_though_a_worker_and_redis_are_killed(run: Run) -> None:
    launcher = run.start("steps=4")
    await_true(lambda: run.steps() >= 1)
    run.processes("rollout --slot 0")[0].kill()
    await_true(lambda: "service crashed, starting it again" in run.said)
    run.processes("redis.sock")[0].kill()
    assert launcher.wait(180) == 0, run.said
    assert run.processes() == []
    summary = run.summary()
    assert summary["steps"] == summary["policy_version"] == 4
    assert summary["requests_trained"] == summary["requests_admitted"] == 16
    assert summary["dead_letters"] == 0
    assert "rollout-0" in run.said
    assert "redis ended, starting it again" in run.said
    assert run.said.count('"event": "step"') == 4
    shown = (run.folder / "stdout").read_text()
    assert f"tlt replay {run.root}" in shown
    for name in ("config.yaml", "metrics.jsonl", "journal", "weights/policy", "tensorboard", "logs/learner.log"):
        assert (run.root / name).exists()


def hostile_requests(request: RolloutRequest) -> list[RolloutRequest]:
    changes: list[dict[str, Any]] = [
        {"prompt": Array.of([5, 2**31 - 1])},
        {"prompt": Array.of([1.5, 2.5], "float32")},
        {"prompt": Array.of([5])},
        {"policy_version": 999_999},
        {"policy_version": -1},
    ]
    return [
        request.model_copy(update={"request_id": f"hostile-{number}", **change})
        for number, change in enumerate(changes)
    ]


def test_requests_that_no_worker_can_answer_are_given_up_and_the_run_completes(run: Run) -> None:
    launcher = run.start("steps=6")
    await_true(lambda: run.steps() >= 1)
    genuine = next(iter(read_journal(run.root / "journal", "requests")))
    url = (run.root / "redis_url").read_text().strip()

    async def submit() -> None:
        bus = await Bus.connect(url, (run.root / "run_id").read_text().strip(), LimitsConfig(), "hostile")
        for request in hostile_requests(genuine):
            await bus.append(REQUESTS, request)
        await bus.close()

    asyncio.run(submit())
    assert launcher.wait(180) == 0, run.said
    assert "service crashed" not in run.said
    summary = run.summary()
    assert summary["requests_trained"] == summary["requests_admitted"] == 24
    logs = run.log("rollout-0") + run.log("rollout-1")
    assert all(f'"request": "hostile-{number}"' in logs for number in range(5))


def test_ctrl_c_drains_and_resume_goes_on(run: Run) -> None:
    launcher = run.start("steps=500", "slots.count=1")
    await_true(lambda: run.steps() >= 1)
    launcher.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert launcher.wait(30) == 130
    assert time.monotonic() - began < 10
    assert run.processes() == []
    assert "killed" not in run.said.split("stopping")[1]
    assert not list(Path("/dev/shm").glob(f"tlt-{(run.root / 'run_id').read_text().strip()}*"))
    assert list((run.root / "blobs").iterdir())  # hidden states to go on with
    assert run.said.splitlines()[-1].endswith(f"go on with: tlt run --resume {run.root}")

    done = run.steps()
    assert run.tlt("status", str(run.root)).wait(20) == 1
    assert "is not running and not finished" in run.said
    assert run.tlt("run", "--resume", str(run.root), f"steps={done + 2}").wait(180) == 0, run.said
    summary = run.summary()
    assert summary["steps"] == summary["policy_version"] == done + 2
    assert summary["requests_trained"] == summary["requests_admitted"] == 4 * (done + 2)
    assert "starting it again" not in run.said
    assert "shards_dropped_missing" not in summary["counts"]
    assert not list((run.root / "blobs").iterdir())

    assert run.tlt("run", "--resume", str(run.root)).wait(20) == 0  # finished: only the summary again
    assert run.tlt("status", str(run.root)).wait(20) == 0


def test_the_trainer_computes_the_states_where_only_tokens_are_streamed(run: Run) -> None:
    settings = "hidden_states.source=recompute", "learner.colocated=false", "drafter.train.keep_steps=9"
    assert run.start("steps=6", *settings).wait(180) == 0, run.said
    summary = run.summary()
    assert summary["steps"] == 6 and summary["dead_letters"] == 0
    assert summary["drafter_tokens_trained"] > 0
    check_shards_were_read(run)


def check_shards_were_read(run: Run) -> None:
    given_back = [json.loads(line) for slot in (0, 1) for line in run.log(f"drafter-trainer-{slot}").splitlines()]
    shards = [line["shards"] for line in given_back if line["event"] == "slot given back"]
    assert any(each.get("read") for each in shards)
    # a slow trainer finds that what it was to read has made room for newer shards
    assert not [each for each in shards if each.keys() - {"read", "known", "too_old", "missing"}]


def test_shards_through_redis_train_the_drafter_and_leave_no_key(run: Run, tmp_path: Path) -> None:
    settings = "hidden_states.store=redis", "hidden_states.bytes_quota=8000000", "learner.colocated=false"
    with start_redis(find_binary(), RedisConfig(maxmemory_mb=64), tmp_path / "redis") as server:
        run.environment["REDIS_URL"] = server.url
        launcher = run.start("steps=6", "drafter.train.keep_steps=9", *settings)
        with redis.Redis.from_url(server.url) as client:
            await_true(lambda: client.keys("tlt:*:blob:*"))
            assert 0 < client.ttl(next(client.scan_iter("tlt:*:blob:*"))) <= 3600
            shards = Path("/dev/shm") / f"tlt-{(run.root / 'run_id').read_text().strip()}"
            assert not shards.exists() and not list((run.root / "blobs").iterdir())
            assert launcher.wait(180) == 0, run.said
            assert client.keys("tlt:*:blob*") == []
    summary = run.summary()
    assert summary["steps"] == 6 and summary["dead_letters"] == 0
    assert summary["drafter_tokens_trained"] > 0
    check_shards_were_read(run)
    assert not list((run.root / "blobs").iterdir())


def test_nothing_survives_a_killed_launcher(run: Run) -> None:
    launcher = run.start("steps=500", "slots.count=1")
    await_true(lambda: run.steps() >= 1)
    assert len(run.processes()) >= 6
    status = run.tlt("status", str(run.root), "--json")
    assert status.wait(20) == 0
    assert json.loads((run.folder / "stdout").read_text())["steps"] == 500
    launcher.kill()
    launcher.wait()
    await_true(lambda: not run.processes(), 10)


def test_a_broken_policy_ends_the_run_with_one_line(run: Run, template: Path) -> None:
    """One whose files are whole: a torn one is told before anything starts."""
    shutil.copytree(load_config(template).policy.model, run.folder / "broken")
    file = run.folder / "broken" / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if name != "model.norm.weight"}, file)
    launcher = run.start("policy.model=./broken")
    assert launcher.wait(120) == 2
    last = run.said.strip().splitlines()[-1]
    assert last.startswith("tlt: learner: ")
    assert "broken" in last and "lack model.norm.weight" in last
    assert "Traceback" not in run.said
    assert run.processes() == []


def test_services_find_each_other_in_any_order(run: Run, tmp_path: Path) -> None:
    """As in one container each: a Redis from outside, a shared run directory that the scheduler prepares."""
    place = ("tiny.yaml", "--run-dir", str(run.root))
    run.environment = {"OMP_NUM_THREADS": "1"}
    with start_redis(find_binary(), RedisConfig(), tmp_path / "redis") as server:
        run.environment["REDIS_URL"] = server.url
        services = [run.tlt("learner", *place)]
        services += [run.tlt("rollout", "--slot", "auto", *place) for _ in range(2)]
        services += [run.tlt("drafter-trainer", "--slot", slot, *place) for slot in ("0", "1")]
        await_true(lambda: "(the scheduler prepares it)" in run.said)
        services.append(run.tlt("scheduler", *place))
        assert [service.wait(180) for service in services] == [0] * 6, run.said
    assert run.summary()["steps"] == 2
