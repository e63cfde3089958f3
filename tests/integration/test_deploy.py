"""The compose file and the image: what can be checked without Docker, and a real run where a Docker engine answers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

from tests.integration.conftest import StartServer
from tests.tiny import tiny_settings, write_tiny_policy
from tlt_pipeline.bus import Bus
from tlt_pipeline.config import LimitsConfig, load_config
from tlt_pipeline.messages import EVENTS
from tlt_services.cli import app

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
SERVICES = ("scheduler", "rollout", "drafter-trainer", "learner")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def read_compose(path: Path = COMPOSE, **variables: str) -> dict[str, Any]:
    """The file as Compose sees it when only `variables` are set."""
    text = _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2], path.read_text())
    return yaml.safe_load(text)


def words_of(service: dict[str, Any]) -> list[str]:
    return shlex.split(service["command"])


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_runs_a_valid_command(name: str) -> None:
    program, command, *arguments = words_of(read_compose()["services"][name])
    assert (program, command) == ("tlt", name)
    group: Any = typer.main.get_command(app)
    parsed = group.commands[command].make_context(command, arguments).params
    assert parsed.get("slot", "auto") == "auto"


def test_the_scheduler_gets_the_config_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    variables = {"CONFIG": "configs/smollm2-135m.yaml", "SLOTS": "3", "OVERRIDES": "steps=7 seed=5"}
    services = read_compose(**variables)["services"]
    _, _, config, *overrides = words_of(services["scheduler"])
    settings = load_config(config, overrides)
    assert (settings.name, settings.slots.count, settings.steps, settings.seed) == ("smollm2-135m", 3, 7, 5)
    assert [int(services[name]["deploy"]["replicas"]) for name in ("rollout", "drafter-trainer")] == [3, 3]


def test_hidden_states_can_go_through_redis_instead_of_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said = re.search(r'`OVERRIDES="(hidden_states.root=null [^"]+)"`', (ROOT / "deploy" / "README.md").read_text())
    assert said
    services = read_compose(OVERRIDES=said[1])["services"]
    _, _, config, *overrides = words_of(services["scheduler"])
    settings = load_config(config, overrides).hidden_states
    assert (settings.store, settings.root) == ("redis", None)
    flags = services["redis"]["command"]
    memory = int(flags[flags.index("--maxmemory") + 1].removesuffix("mb")) << 20
    assert settings.bytes_limit <= memory / 2


def test_the_default_is_the_quickstart_with_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    services = read_compose()["services"]
    _, _, config, *overrides = words_of(services["scheduler"])
    settings = load_config(config, overrides)
    assert config == "configs/quickstart.yaml"
    assert settings.slots == load_config(config).slots
    assert int(services["rollout"]["deploy"]["replicas"]) == settings.slots.count


def test_services_share_what_they_must() -> None:
    content = read_compose()
    for name in SERVICES:
        service = content["services"][name]
        assert service["image"] == content["services"]["scheduler"]["image"]
        assert service["environment"]["TLT_RUN_DIR"].startswith("/data/")
        assert "data:/data" in service["volumes"]
    shards = next(word for word in words_of(content["services"]["scheduler"]) if word.startswith("hidden_states.root="))
    assert shards.startswith("hidden_states.root=/data/")


def test_everything_is_watched_restarted_after_a_crash_and_drained() -> None:
    for name, service in read_compose()["services"].items():
        assert service["healthcheck"]["test"], name
        assert service["restart"].startswith("on-failure"), name  # exit 0 means done: not started again
        assert int(service["stop_grace_period"].removesuffix("s")) > LimitsConfig().drain_s, name
        assert name == "redis" or service["init"] is True, name


def test_redis_is_private_durable_and_never_drops_work() -> None:
    service = read_compose(REDIS_PASSWORD="secret")["services"]["redis"]
    assert "ports" not in service and "network_mode" not in service
    flags = dict(zip(service["command"][1::2], service["command"][2::2], strict=True))
    assert flags["--requirepass"] == "secret"
    assert (flags["--appendonly"], flags["--appendfsync"], flags["--save"]) == ("yes", "everysec", "")
    assert flags["--maxmemory-policy"] == "noeviction" and flags["--maxmemory"]
    services = read_compose(REDIS_PASSWORD="secret")["services"]
    assert all(services[name]["environment"]["REDIS_URL"].startswith("redis://:secret@redis:") for name in SERVICES)


def test_the_gpu_override_names_only_services_that_exist() -> None:
    override = read_compose(ROOT / "deploy" / "compose.gpu.yaml")
    assert set(override["services"]) == set(SERVICES)


def test_what_the_image_copies_reaches_the_build() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M) for word in line.split()}
    needed = copied | {"README.md", "tlt_pipeline", "services", "kernels"}
    assert needed <= kept
    assert all((ROOT / path).exists() for path in kept)


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_image_gets_the_pins_of_the_project() -> None:
    listed = load_script("requirements").requirements
    lines = listed(ROOT / "pyproject.toml", ["math"])
    assert any(line.startswith("torch==") for line in lines)
    assert any(line.startswith("math-verify==") for line in lines) and any("setuptools" in line for line in lines)
    assert not any(line.startswith("pytest") for line in lines)
    with pytest.raises(SystemExit, match="no extra maths: choose"):
        listed(ROOT / "pyproject.toml", ["maths"])


async def test_health_is_that_the_service_speaks_to_redis(start_server: StartServer) -> None:
    examine = load_script("healthcheck").examine
    server = start_server()
    assert "not connected" in examine(server.url)
    bus = await Bus.connect(server.url, "health", LimitsConfig(), "rollout-0")
    await bus.depth(EVENTS)
    assert examine(server.url) is None
    await bus.close()


def test_health_says_when_redis_is_gone(start_server: StartServer) -> None:
    server = start_server()
    server.close()
    assert "Redis can't be asked" in load_script("healthcheck").examine(server.url)


# --- with Docker -------------------------------------------------------------------------------------------------


def docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    calls = (["docker", "info"], ["docker", "compose", "version"])
    return all(subprocess.run(call, capture_output=True, timeout=20).returncode == 0 for call in calls)


class Stack:
    """One compose project of this test's own, with a tiny policy and config as its configs."""

    def __init__(self, folder: Path) -> None:
        self.name = f"tlt-test-{uuid.uuid4().hex[:8]}"
        configs = folder / "configs"
        configs.mkdir()
        write_tiny_policy(configs / "policy")
        settings = tiny_settings(Path("configs/policy"), steps=30, rollout__prompts_per_step=8)
        (configs / "tiny.yaml").write_text(yaml.safe_dump(settings))
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)  # the container's user is another one
        wheels = next((part for part in os.environ.get("PIP_FIND_LINKS", "").split() if Path(part).is_dir()), None)
        self.environment = {
            **os.environ,
            "TLT_CONFIGS": str(configs),
            "CONFIG": "configs/tiny.yaml",
            **({"TLT_WHEELS": wheels} if wheels and "TLT_WHEELS" not in os.environ else {}),
        }

    def command(self, *words: str) -> list[str]:
        return ["docker", "compose", "-f", str(COMPOSE), "-p", self.name, *words]

    def call(self, *words: str, timeout: float = 120) -> str:
        ran = subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout

    def containers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.call("ps", "-a", "--format", "json").splitlines()]

    def steps_done(self) -> int:
        ran = subprocess.run(
            self.command("exec", "-T", "scheduler", "cat", "/data/runs/run/metrics.jsonl"),
            env=self.environment,
            capture_output=True,
            timeout=60,
        )
        return len(ran.stdout.splitlines())


def inspect(container: str, template: str) -> str:
    ran = subprocess.run(["docker", "inspect", "-f", template, container], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path)
    yield made
    subprocess.run(made.command("down", "-v", "--timeout", "5"), env=made.environment, capture_output=True, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not docker_answers(), reason="no Docker engine with compose answers")
def test_a_run_in_containers_survives_a_kill_and_ends_by_itself(stack: Stack) -> None:
    stack.call("build", timeout=1800)
    up = subprocess.Popen(
        stack.command("up", "--scale", "rollout=2", "--scale", "drafter-trainer=2"),
        env=stack.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while stack.steps_done() < 2:
            assert time.monotonic() < deadline and up.poll() is None
            time.sleep(0.5)
        victim = next(entry["Name"] for entry in stack.containers() if entry["Service"] == "rollout")
        # From inside: `docker kill` would count as wanted, and the engine's process ids may not be this machine's.
        subprocess.run(["docker", "exec", victim, "sh", "-c", "kill -9 -1"], capture_output=True, timeout=60)
        assert up.wait(timeout=300) == 0
    finally:
        up.kill()
        up.wait()
    assert int(inspect(victim, "{{.RestartCount}}")) == 1
    ended = {entry["Name"]: (entry["State"], entry["ExitCode"]) for entry in stack.containers()}
    services = {name: end for name, end in ended.items() if "redis" not in name}
    assert len(services) == 6 and set(services.values()) == {("exited", 0)}
    summary = json.loads(
        stack.call("run", "--rm", "--no-deps", "-T", "scheduler", "cat", "/data/runs/run/summary.json")
    )
    assert summary["steps"] == 30
    assert summary["requests_trained"] == summary["requests_admitted"] and summary["dead_letters"] == 0
