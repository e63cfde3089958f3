"""The supervisor with real child processes: small scripts in the place of services."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.tiny import tiny_settings
from tlt_pipeline.config import RunConfig, validate_config
from tlt_pipeline.rundir import StorageError
from tlt_services.supervisor import (
    RunEnded,
    Service,
    Supervisor,
    environment_of,
    services_of,
    threads_of,
)


@dataclass(frozen=True)
class Script(Service):
    """A service that runs `code`."""

    code: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(self.code)]


FOREVER = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return validate_config(tiny_settings(tmp_path, limits__max_restarts=2))


@pytest.fixture
def start(config: RunConfig, tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    supervisors: list[Supervisor] = []

    def begin(*services: Service) -> Supervisor:
        supervisor = Supervisor(config, tmp_path, "unix:///nowhere")
        supervisors.append(supervisor)
        supervisor.start(services)
        return supervisor

    yield begin
    for supervisor in supervisors:
        supervisor.kill()


def watch(supervisor: Supervisor, until: Callable[[], object], is_complete: bool = True) -> bool:
    """`check` until it says that the run is over, or `until` is true."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if supervisor.check(lambda: is_complete):
            return True
        if until():
            return False
        time.sleep(0.01)
    raise TimeoutError


def sleep(seconds: float) -> bool:
    time.sleep(min(seconds, 0.01))
    return True


def await_end(pid: int) -> None:
    """A process that ended and that nobody has waited for yet counts as ended."""
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def log_of(supervisor: Supervisor, name: str) -> str:
    return next(child.log_path.read_text() for child in supervisor.children if child.service.name == name)


def test_the_run_is_over_when_the_scheduler_ends_well(start: Callable[..., Supervisor]) -> None:
    supervisor = start(Script("scheduler", code="pass"), Script("learner", code="pass"))
    assert watch(supervisor, lambda: False)
    assert supervisor.finish(5, sleep) == []


def test_a_scheduler_that_stops_early_is_not_the_end(start: Callable[..., Supervisor]) -> None:
    supervisor = start(Script("scheduler", code="pass"))
    scheduler = supervisor.children[0]
    assert not watch(supervisor, lambda: scheduler.ended_well_at, is_complete=False)


def test_a_killed_service_is_started_again(start: Callable[..., Supervisor]) -> None:
    supervisor = start(Script("rollout", 1, FOREVER))
    child = supervisor.children[0]
    watch(supervisor, lambda: "up" in child.log_path.read_text())
    first = child.process
    assert first is not None
    first.kill()
    watch(supervisor, lambda: child.log_path.read_text().count("up") == 2)
    assert child.restarts == 1
    assert child.process is not None and child.process.pid != first.pid


def test_restarts_have_a_limit(start: Callable[..., Supervisor]) -> None:
    supervisor = start(Script("learner", code="raise SystemExit(7)"))
    with pytest.raises(RunEnded, match=r"learner ended 3 times, last with exit code 7.*limits.max_restarts") as ended:
        watch(supervisor, lambda: False)
    assert ended.value.exit_code == 1


def test_a_full_disk_ends_the_run_instead_of_restarts(
    start: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = start(Script("learner", code="raise SystemExit(1)"))
    write = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if path.name.startswith(".probe"):
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(StorageError, match=r"no space left for .*--resume"):
        watch(supervisor, lambda: False)


@pytest.mark.parametrize(("code", "public"), [(2, 2), (3, 1)])
def test_what_a_restart_will_not_mend_ends_the_run(start: Callable[..., Supervisor], code: int, public: int) -> None:
    line = '{"event": "failed", "reason": "no model here: fetch it"}'
    supervisor = start(Script("learner", code=f"print('{line}'); raise SystemExit({code})"))
    with pytest.raises(RunEnded, match=r"^learner: no model here: fetch it$") as ended:
        watch(supervisor, lambda: False)
    assert ended.value.exit_code == public


def test_the_reason_of_an_earlier_life_is_not_repeated(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "learner.log").write_text('{"event": "failed", "reason": "old"}\n')
    supervisor = start(Script("learner", code="raise SystemExit(2)"))
    with pytest.raises(RunEnded, match=r"^learner: exit code 2, see"):
        watch(supervisor, lambda: False)


def test_stopping_drains_and_then_kills_with_grandchildren(start: Callable[..., Supervisor]) -> None:
    good = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
        print("up", flush=True)
        time.sleep(600)
    """
    stubborn = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("up", child.pid, flush=True)
        time.sleep(600)
    """
    supervisor = start(Script("learner", code=good), Script("rollout", 0, stubborn))
    watch(supervisor, lambda: all("up" in child.log_path.read_text() for child in supervisor.children))
    assert supervisor.stop(1.0, sleep) == ["rollout-0"]
    assert "drained" in log_of(supervisor, "learner")
    grandchild = int(log_of(supervisor, "rollout-0").split()[1])
    await_end(grandchild)


def test_a_second_stop_cuts_draining_short(start: Callable[..., Supervisor]) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    supervisor = start(Script("learner", code=code))
    watch(supervisor, lambda: "up" in log_of(supervisor, "learner"))
    began = time.monotonic()
    assert supervisor.stop(60, lambda _: False) == ["learner"]
    assert time.monotonic() - began < 10


def test_children_die_with_a_killed_launcher(config: RunConfig, tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path.cwd())!r})
        from pathlib import Path
        from tests.tiny import tiny_settings
        from tlt_pipeline.config import validate_config
        from tests.unit.test_supervisor import Script, Supervisor
        child = '''
        from tlt_pipeline.processes import bind_to_launcher
        import time
        bind_to_launcher()
        print("bound", flush=True)
        time.sleep(600)'''
        config = validate_config(tiny_settings(Path({str(tmp_path)!r})))
        supervisor = Supervisor(config, Path({str(tmp_path)!r}), "unix:///nowhere")
        supervisor.start([Script("learner", code=child)])
        print(supervisor.children[0].process.pid, flush=True)
        while "bound" not in supervisor.children[0].log_path.read_text():
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    await_end(int(ran.stdout))


def test_threads_never_exceed_the_cores_of_those_that_work_at_one_time(config: RunConfig, tmp_path: Path) -> None:
    free = config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"threads": 0}),
            "learner": config.learner.model_copy(update={"threads": 0}),
        }
    )
    by_name = {service.name: threads_of(service, free, cores=8) for service in services_of(free)}
    assert by_name == {
        "scheduler": 1,
        "rollout-0": 4,
        "rollout-1": 4,
        "drafter-trainer-0": 4,
        "drafter-trainer-1": 4,
        "learner": 8,
    }
    environment = environment_of(Service("rollout", 0), config, tmp_path, "redis://x")
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["MKL_DYNAMIC"] == "FALSE"
