"""Run directories taken up again, and slots that claim themselves."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from tests.tiny import tiny_settings, write_tiny_policy
from tlt_pipeline.config import ConfigError, RunConfig, dump_config, load_config, validate_config
from tlt_pipeline.models.checkpoint import load_decoder, save_drafter
from tlt_pipeline.models.drafter import drafter_from_policy
from tlt_pipeline.models.eagle3_start import eagle3_from_policy
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.rundir import RunDir, RunDirError
from tlt_services.preparation import (
    check_models,
    default_root,
    is_finished,
    is_prepared,
    make_run,
    note_redis,
    resume_run,
)
from tlt_services.roles import claim_slot
from tlt_services.status import newest_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return validate_config(tiny_settings(tmp_path))


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> RunDir:
    return make_run(config, tmp_path / "run", fresh=True)


def test_the_resolved_config_reads_back_equal(config: RunConfig, run: RunDir) -> None:
    assert is_prepared(run.root)
    assert load_config(run.config) == config


@pytest.mark.parametrize("text", ["a${b}", "${b}", "\\${b}", "a\\\\${b} ${c", "off", "1e-3", "#x", "ü → \n"])
def test_any_text_in_a_config_reads_back_the_same(config: RunConfig, tmp_path: Path, text: str) -> None:
    odd = config.model_copy(update={"task": config.task.model_copy(update={"answer_pattern": text})})
    dump_config(odd, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").task.answer_pattern == text


def test_a_folder_with_other_things_in_it_is_refused(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirError, match="is not empty and holds no run: name another --run-dir"):
        make_run(config, tmp_path, fresh=True)


def test_resume_may_lengthen_a_run_but_not_make_it_another(run: RunDir) -> None:
    config, _ = resume_run(None, ["steps=9", "learner.lr=1e-5", "limits.drain_s=3"], run.root)
    assert load_config(run.config) == config
    assert (config.steps, config.learner.lr) == (9, 1e-5)
    for change, key in (("seed=5", "seed"), ("rollout.group_size=4", "rollout"), ("engine.exact=off", "engine.exact")):
        with pytest.raises(ConfigError, match=rf"{key} can't change within a run"):
            resume_run(None, [change], run.root)
    assert load_config(run.config) == config


def test_resume_with_the_config_file_again(config: RunConfig, run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(tmp_path, steps=4)))
    assert resume_run(path, [], run.root)[0].steps == 4
    run.config.unlink()
    with pytest.raises(RunDirError, match=r"has no config\.yaml: give the config too"):
        resume_run(None, [], run.root)
    assert resume_run(path, [], run.root)[0].steps == 4


def test_finished_means_all_the_steps_of_today(run: RunDir) -> None:
    assert not is_finished(run.root)
    run.summary.write_text(json.dumps({"steps": 2}))
    assert is_finished(run.root)
    resume_run(None, ["steps=3"], run.root)
    assert not is_finished(run.root)


def test_the_redis_note_is_this_users_alone(run: RunDir) -> None:
    note_redis("redis://user:secret@host/0", run)
    note_redis("redis://user:secret@host/1", run)
    assert run.redis_url.read_text() == "redis://user:secret@host/1\n"
    assert stat.S_IMODE(run.redis_url.stat().st_mode) == 0o600


def test_default_directory_and_the_newest(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run in"):
        newest_run()
    root = default_root(config)
    assert root.parent == Path("runs") and root.name.startswith("tiny-")
    make_run(config, root, fresh=True)
    assert newest_run() == root
    assert default_root(config.model_copy(update={"run_dir": "here"})) == Path("here")
    assert default_root(config.model_copy(update={"name": "../../up/there"})).parent == Path("runs")


def test_slots_claim_themselves_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    assert [claim_slot(folder, "rollout", 2) for _ in range(2)] == [0, 1]
    assert claim_slot(folder, "drafter-trainer", 2) == 0
    with pytest.raises(ConfigError, match="all 2 slots have a rollout process"):
        claim_slot(folder, "rollout", 2)


# --- what a run begins with -------------------------------------------------------------------------------------------


def begun(tmp_path: Path, kind: str = "eagle", **changes: object) -> RunConfig:
    """A run with a policy and a first drafter in folders."""
    policy = load_decoder(write_tiny_policy(tmp_path / "policy"))
    made = drafter_from_policy(policy) if kind == "eagle" else eagle3_from_policy(policy)
    save_drafter(made, tmp_path / "drafter")
    return validate_config(
        tiny_settings(tmp_path / "policy", drafter__init=str(tmp_path / "drafter"), drafter__kind=kind, **changes)
    )


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_sound_drafter_passes(tmp_path: Path, kind: str) -> None:
    check_models(begun(tmp_path, kind))


def _rewrite(folder: Path, **settings: object) -> None:
    content = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(content))


def _reweigh(folder: Path, **tensors: np.ndarray) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


DAMAGE = [
    ("drafter", lambda at: (at / "model.safetensors").write_bytes(b"torn"), "is torn"),
    (
        "drafter",
        lambda at: (at / "model.safetensors").write_bytes((at / "model.safetensors").read_bytes()[:-9]),
        "torn",
    ),
    ("drafter", lambda at: (at / "model.safetensors").unlink(), "has neither"),
    ("drafter", lambda at: (at / "config.json").write_text("{"), "is not JSON"),
    ("drafter", lambda at: (at / "config.json").write_text("{}"), "holds no drafter"),
    ("drafter", lambda at: _rewrite(at, hidden_size=64), "hidden_size 64, not 32"),
    ("drafter", lambda at: _reweigh(at, **{"fc.weight": np.zeros((3, 4), np.float32)}), r"fc.weight is \(3, 4\)"),
    ("drafter", lambda at: _reweigh(at, more=np.zeros(3, np.float32)), "has more, which"),
    ("drafter", lambda at: _reweigh(at, draft_ids=np.zeros(3, np.float32)), "draft_ids can't be F32"),
    ("drafter", lambda at: _reweigh(at, **{"lm_head.weight": np.zeros(3, np.float32)}), "must not carry the policy's"),
    ("policy", lambda at: (at / "model.safetensors").write_bytes(b"torn"), "is torn"),
    ("policy", lambda at: _rewrite(at, hidden_act="relu"), "activation 'relu' is not supported"),
]


@pytest.mark.parametrize(("which", "damage", "reason"), DAMAGE, ids=[reason for _, _, reason in DAMAGE])
def test_damage_is_told_before_anything_starts(tmp_path: Path, which: str, damage, reason: str) -> None:
    config = begun(tmp_path)
    damage(tmp_path / which)
    with pytest.raises(ModelError, match=reason) as caught:
        check_models(config)
    assert "\n" not in str(caught.value)


def test_another_kind_is_told_before_anything_starts(tmp_path: Path) -> None:
    config = begun(tmp_path)
    other = config.model_copy(update={"drafter": config.drafter.model_copy(update={"kind": "eagle3"})})
    with pytest.raises(ModelError, match=r"set drafter\.kind=eagle,"):
        check_models(other)


def test_the_check_imports_no_torch_and_takes_no_time(tmp_path: Path) -> None:
    config = begun(tmp_path)
    dump_config(config, tmp_path / "run.yaml")
    code = (
        "import sys; from tlt_pipeline.config import load_config; from tlt_services.preparation import check_models\n"
        f"config = load_config({str(tmp_path / 'run.yaml')!r})\n"
        "check_models(config)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
