"""`tlt bench drafter` with everything real: two short runs of the quickstart."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tlt_services import bench_drafter

CONFIG = Path("configs/quickstart.yaml")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_static_and_adaptive_write_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "drafter.json"
    small = ["steps=2", "rollout.prompts_per_step=4", "engine.threads=1", "learner.threads=1"]
    assert bench_drafter.main(CONFIG, small, file, None, 1.0) == 0
    report = json.loads(file.read_text())
    assert report["steps"] == [0, 1]
    assert report["identical"] == report["answers"] == 32
    static, adaptive = report["static"], report["adaptive"]
    assert static["drafter_version_by_step"] == [1, 1]
    assert min(static["acceptance_length_by_step"]) > 2, "the first drafter is used, though nobody trains it"
    assert (static["drafter_tokens_trained"], static["slot_idle_used_s"]) == (0, 0.0)
    assert adaptive["drafter_tokens_trained"] > 0
    proposals = report["proposals"]
    assert proposals["identical"] == proposals["answers"] == 16
    assert proposals["shared_noise"]["acceptance_by_position"][0] > 0.5
    kinds = report["kinds"]
    assert kinds["eagle"]["equal_tokens"]["tokens"] == kinds["eagle3"]["equal_tokens"]["tokens"] > 0
    assert kinds["eagle"]["equal_seconds"]["acceptance_length"] > 1.5
    assert file.with_suffix(".png").exists()
