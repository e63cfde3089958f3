"""`on` and `off` mean the words, in files and overrides alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.tiny import tiny_settings
from tlt_pipeline.config import ConfigError, load_config


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
