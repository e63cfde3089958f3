"""A service that is started by hand or by a container: which run it takes up, and which slot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny import tiny_settings
from tlt_pipeline.config import ConfigError, load_config
from tlt_services.preparation import is_finished, is_prepared, make_run
from tlt_services.roles import claim_slot


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(tmp_path / "policy")))
    return path


def start(role: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tlt_services.cli", role, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def finish_run(config: Path, directory: Path, steps: int) -> None:
    """As the scheduler leaves it."""
    run = make_run(load_config(config), directory, fresh=True)
    run.summary.write_text(json.dumps({"steps": steps}))


def test_a_finished_run_is_said_to_be_one_and_ends_the_service_well(config: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    finish_run(config, directory, steps=2)
    ran = start("scheduler", config, "--run-dir", directory)
    assert ran.returncode == 0
    assert "is finished: raise steps" in ran.stderr


def test_a_run_is_finished_when_all_its_steps_are_done(config: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert not is_finished(directory)
    finish_run(config, directory, steps=1)
    assert is_prepared(directory) and not is_finished(directory)
    (directory / "summary.json").write_text(json.dumps({"steps": 2}))
    assert is_finished(directory)


def test_a_config_of_another_run_is_refused(config: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    finish_run(config, directory, steps=2)
    ran = start("scheduler", config, "seed=9", "--run-dir", directory)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and "seed can't change within a run" in ran.stderr


def test_every_process_gets_a_slot_of_its_own_and_one_too_many_is_told(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tlt_services.roles import claim_slot;"
        "print(claim_slot(pathlib.Path(sys.argv[1]), 'rollout', 2), flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "slots")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "0\n"
        assert claim_slot(tmp_path / "slots", "drafter-trainer", 2) == 0
        assert claim_slot(tmp_path / "slots", "rollout", 2) == 1
        with pytest.raises(ConfigError, match="all 2 slots have a rollout process"):
            claim_slot(tmp_path / "slots", "rollout", 2)
        other.kill()
        other.wait()
        assert claim_slot(tmp_path / "slots", "rollout", 2) == 0
