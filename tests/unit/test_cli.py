"""The command line: what it answers, how fast, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import save_file

from tests.tiny import tiny_settings, write_tiny_policy
from tlt_pipeline.failures import explain
from tlt_pipeline.folders import NoSpace
from tlt_pipeline.models.architecture import describe
from tlt_pipeline.models.checkpoint import load_decoder, save_drafter
from tlt_pipeline.models.decoder import DecoderConfig
from tlt_pipeline.models.drafter import drafter_from_policy
from tlt_pipeline.models.export import export_drafter
from tlt_services import doctor
from tlt_services.cli import _place_of, invoke

SMALL = DecoderConfig(16, 32, 48, 2, 4, 2, 8, 64)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid config in an empty working directory; the policy it names has no tensors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TLT_RUN_DIR", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)
    policy, path = tmp_path / "policy", tmp_path / "tiny.yaml"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps(describe(SMALL)))
    save_file({}, policy / "model.safetensors")
    path.write_text(yaml.safe_dump(tiny_settings(policy)))
    return path


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tlt_services.cli import invoke; invoke(['--help']); "
        "print(sorted({'torch', 'transformers', 'numpy', 'redis', 'pydantic'} & set(sys.modules)))"
    )
    before = os.times()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    # CPU time is what it takes on a machine that does nothing else; about 0.2 s
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent < 1.0
    assert ran.stdout.splitlines()[-1] == "[]"
    for command in ("run", "sft", "rollout", "drafter-trainer", "learner", "scheduler", "status", "replay", "doctor"):
        assert f"  {command} " in ran.stdout


def test_launcher_needs_no_torch() -> None:
    """It shares its cores with the training, and each further import would be memory taken from it."""
    code = "import sys, tlt_services.launcher; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


BAD_CALLS = [
    ("run", 2, "say what to run"),
    ("run nowhere.yaml", 2, "no config file nowhere.yaml"),
    ("run .", 2, "tlt run --resume ."),
    ("run --resume .", 2, "holds no run"),
    ("run tiny.yaml stepz=3", 2, "did you mean 'steps'?"),
    ("run tiny.yaml steps=many", 2, "steps: "),
    ("run tiny.yaml steps", 2, "'steps' is not key.sub=value"),
    ("run tiny.yaml --run-dir tiny.yaml", 2, "name another --run-dir"),
    ("run tiny.yaml policy.model=./nowhere", 2, "no model './nowhere' here"),
    ("run tiny.yaml drafter.init=./nowhere drafter.train.enabled=false", 2, "no drafter in ./nowhere"),
    ("run tiny.yaml drafter.init=./policy", 2, "holds no drafter"),
    ("run tiny.yaml --bogus", 2, "No such option: --bogus"),
    ("sft tiny.yaml", 2, "no sft section"),
    ("rollout", 2, "Missing option '--slot'"),
    ("rollout --slot 0", 2, "--run-dir DIR, $TLT_RUN_DIR"),
    ("rollout --slot one --run-dir .", 2, "give the number of a slot, or auto"),
    ("scheduler nowhere.yaml", 2, "no config file nowhere.yaml"),
    ("status", 2, "no run in"),
    ("status .", 2, "holds no run"),
    ("replay .", 2, "is no run directory"),
    ("replay . --all --sample 3", 2, "exclude each other"),
    ("replay . --drafter newest", 2, "give none, latest, or the number of a version"),
    ("bench e2e nowhere.yaml", 2, "no config file"),
    ("bench e2e tiny.yaml --json .", 2, "--json . can't be written"),
    ("bench e2e tiny.yaml --parts engine.speculation.drafter=ngram", 2, "leave --parts out"),
    ("bench drafter tiny.yaml engine.speculation.drafter=off", 2, "set it to eagle"),
    ("bench drafter tiny.yaml --png .", 2, "--png . can't be written"),
    ("config check tiny.yaml rollout.group_sise=2", 2, "did you mean 'group_size'?"),
    ("models fetch gpt-9", 2, "known are smollm2-135m"),
    ("rolout", 2, "Did you mean 'rollout'?"),
]


@pytest.mark.parametrize(("call", "code", "text"), BAD_CALLS, ids=[call for call, _, _ in BAD_CALLS])
def test_a_mistake_is_one_line_with_the_remedy(
    config: Path, capfd: pytest.CaptureFixture[str], call: str, code: int, text: str
) -> None:
    assert invoke(call.split()) == code
    said = capfd.readouterr().err.strip()
    assert text in said
    assert len(said.splitlines()) == 1
    assert said.startswith("tlt")


@pytest.mark.parametrize("call", ["--debug run nowhere.yaml", "run nowhere.yaml --debug"])
def test_debug_shows_the_traceback_wherever_it_stands(
    config: Path, capfd: pytest.CaptureFixture[str], call: str
) -> None:
    assert invoke(call.split()) == 2
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert said.strip().splitlines()[-1].startswith("tlt: no config file")


def test_an_unexpected_error_points_to_debug(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(**_: object) -> int:
        raise KeyError("lost")

    monkeypatch.setattr(doctor, "examine", break_down)
    assert invoke(["doctor"]) == 1
    assert capfd.readouterr().err.strip() == "tlt: unexpected KeyError: 'lost'; --debug shows the traceback"


def test_unreachable_redis_is_one_line(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = "run tiny.yaml redis.url=redis://127.0.0.1:1/0 redis.connect_timeout_s=0.2 --run-dir r"
    assert invoke(call.split()) == 2
    assert "tlt: no Redis answers at redis://127.0.0.1:1" in capfd.readouterr().err


def test_a_full_disk_is_one_line(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "r/config.yaml")

    monkeypatch.setattr("tlt_services.preparation.dump_config", refuse)
    assert invoke(["run", "tiny.yaml", "--run-dir", "r"]) == 1
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("tlt: no space left for ")


WRITERS = [
    ("export-drafter drafter --policy policy --out {}", "--out"),
    ("import-drafter drafter --policy policy --out {}", "--out"),
    ("drafter warmup tiny.yaml --out {}", "--out"),
    ("run tiny.yaml --run-dir {}", "--run-dir"),
    ("sft tiny.yaml sft.out={}", "sft.out=DIR"),
    ("models fetch smollm2-135m", "TLT_CACHE"),
    ("doctor", None),
]


@pytest.mark.parametrize(("call", "option"), WRITERS, ids=[call for call, _ in WRITERS])
def test_the_way_out_of_a_full_disk_is_one_that_the_command_has(call: str, option: str | None) -> None:
    assert _place_of(call.split()) == option
    for error in (OSError(28, "full", "x"), OSError(13, "denied", "x"), NoSpace("no space left to write x: free some")):
        line = explain(error, option).line
        assert ("choose another place with" in line) == (option is not None)
        assert option is None or line.endswith(f"with {option}")


@pytest.mark.parametrize("call", [call for call, option in WRITERS if option == "--out"])
def test_a_place_that_cannot_be_written_is_one_line(config: Path, capfd: pytest.CaptureFixture[str], call: str) -> None:
    write_tiny_policy(config.parent / "tiny")
    policy = load_decoder(config.parent / "tiny")
    save_drafter(drafter_from_policy(policy), config.parent / "drafter")
    if "import" in call:
        exported = config.parent / "exported"
        export_drafter(drafter_from_policy(policy), policy.config, policy.norm.weight, exported)
    words = call.format("tiny.yaml/out").replace("--policy policy", "--policy tiny").split()
    words = [word.replace("drafter", "exported") if "import" in call and word == "drafter" else word for word in words]
    assert invoke(words) == 1
    said = capfd.readouterr().err.strip()
    assert said.startswith("tlt: no folder can be made") and said.endswith("choose another place with --out")


def test_a_used_run_directory_needs_resume(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = "run tiny.yaml redis.url=redis://127.0.0.1:1/0 redis.connect_timeout_s=0.2 --run-dir r"
    assert invoke(call.split()) == 2
    capfd.readouterr()
    assert invoke(call.split()) == 2
    assert "go on with it (--resume), or name another --run-dir" in capfd.readouterr().err
    assert invoke([*call.split(), "--resume", "seed=3"]) == 2
    assert "seed can't change within a run" in capfd.readouterr().err
    run_id = (config.parent / "r" / "run_id").read_text().strip()
    assert not list(Path("/dev/shm").glob(f"tlt-{run_id}*")), "a run that could not start leaves nothing in memory"


def test_config_check_and_models_list(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke(["config", "check", "tiny.yaml", "steps=7"]) == 0
    assert "valid (7 steps, 2 slots" in capfd.readouterr().out
    assert invoke(["models", "list"]) == 0
    assert capfd.readouterr().out.startswith("smollm2-135m: ")
