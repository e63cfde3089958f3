"""A drafter made before RL: better than its start on answers that it never saw, and a folder that a run begins with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.unit.drafter_cases import one_thread  # noqa: F401
from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.drafter.start import start_drafter
from tlt_pipeline.drafter.texts import TextWriter
from tlt_pipeline.drafter.warmup import FEWEST_ANSWERS, run_warmup
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import render

CONFIGS = Path(__file__).parents[2] / "configs"
POLICY = CONFIGS / "quickstart-policy"


def config(**drafter: str) -> RunConfig:
    cold = {"policy.model": POLICY, "drafter.init": "from_policy_layer"}
    settings = {**cold, "engine.threads": 1, "rollout.max_new_tokens": 48, **drafter}
    return load_config(CONFIGS / "quickstart.yaml", [f"{name}={value}" for name, value in settings.items()])


def test_a_warm_drafter_is_better_than_its_start_and_a_run_begins_with_it(tmp_path: Path) -> None:
    out = tmp_path / "warm"
    report = run_warmup(config(), out, seconds=6.0)
    assert report.acceptance_length > report.acceptance_length_start > 1.0
    assert json.loads((out / "warmup.json").read_text())["acceptance_length"] == report.acceptance_length
    policy, tokenizer = load_decoder(POLICY), load_tokenizer(POLICY)
    begun = start_drafter(config(**{"drafter.init": str(out)}), policy, tokenizer)
    cold = start_drafter(config(), policy, tokenizer)
    assert not torch.equal(begun.fc.weight, cold.fc.weight)
    again = run_warmup(config(**{"drafter.init": str(out)}), out, seconds=1.0)  # goes on from it, in its place
    assert again.acceptance_length_start > report.acceptance_length_start


def test_where_writing_is_slow_fewer_answers_are_written_and_trained_on(tmp_path: Path) -> None:
    report = run_warmup(config(), tmp_path / "warm", seconds=0.1)
    assert report.answers == FEWEST_ANSWERS and report.tokens_trained > 0


def test_texts_are_the_tasks_prompts_with_the_policys_answers() -> None:
    settings, policy, tokenizer = config(), load_decoder(POLICY), load_tokenizer(POLICY)
    texts, pieces = TextWriter(settings, policy, tokenizer, 16).write(0, 8)
    prompts = [render(each, settings.task, tokenizer) for each in TaskMix(settings.task, settings.seed).draw(0, 8)]
    for text, prompt in zip(texts, prompts, strict=True):
        assert text[: len(prompt)].tolist() == prompt
        assert 0 < len(text) - len(prompt) <= 16
    assert sum(piece.tokens_T.shape[0] for piece in pieces) == sum(
        len(text) - 1 for text in texts
    )  # the last is unread


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="is no drafter's folder"):
        run_warmup(config(), tmp_path, seconds=1.0)


def test_a_policys_folder_is_never_taken_for_a_drafters(tmp_path: Path) -> None:
    policy = shutil.copytree(POLICY, tmp_path / "policy")
    before = sorted(path.name for path in policy.iterdir())
    with pytest.raises(ConfigError, match="is no drafter's folder"):
        run_warmup(config(), policy, seconds=1.0)
    assert sorted(path.name for path in policy.iterdir()) == before


def test_a_mistyped_start_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no drafter in configs/nowhere"):
        run_warmup(config(**{"drafter.init": "configs/nowhere"}), tmp_path / "warm", seconds=1.0)
