"""`on` and `off` mean the words, in files and overrides alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.tiny import tiny_settings
from tlt_pipeline.config import ConfigError, load_config, validate_config


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_exact_by_override_and_by_file(tmp_path: Path, word: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(tmp_path)))
    assert load_config(path, [f"engine.exact={word}"]).engine.exact == word
    path.write_text(path.read_text().replace("threads: 1", f"threads: 1\n  exact: {word}", 1))
    assert load_config(path).engine.exact == word


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.betas=[1.5,0.9]", "less than 1"),
        ("learner.lr=.inf", "finite"),
        ("rollout.stop=['']", "at least 1 character"),
        ("telemetry.metrics_port=65533", "needs ports up to"),
        ("steps=", "it is empty"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(tmp_path: Path, override: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(tmp_path)))
    with pytest.raises(ConfigError, match=said):
        load_config(path, [override])


def test_drafter_off(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(tmp_path)))
    config = load_config(path, ["engine.speculation.drafter=off", "drafter.train.enabled=off"])
    assert config.engine.speculation.drafter == "off"
    assert config.drafter.train.enabled is False


@pytest.mark.parametrize(
    ("prompts", "steps", "given", "used"),
    [(32, 12, 0.1, 0.1), (8, 8, 0.1, 0.1), (8, 6, 0.1, 0.125), (8, 2, 0.1, 0.25), (8, 2, 0.4, 0.4), (2, 2, 0.0, 0.0)],
)
def test_few_prompts_hold_a_larger_share_out(prompts: int, steps: int, given: float, used: float) -> None:
    config = validate_config(
        {
            "policy": {"model": "somewhere"},
            "task": {"sources": [{"name": "chain_sum"}]},
            "rollout": {"prompts_per_step": prompts},
            "drafter": {"train": {"keep_steps": steps}},
            "hidden_states": {"held_out_share": given},
        }
    )
    assert config.held_out_share == used
