"""`tlt bench e2e --parts` with everything real: five runs of a tiny policy."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.tiny import write_tiny_config
from tlt_pipeline.config import load_config
from tlt_pipeline.rundir import RunDir
from tlt_services import bench


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_part_writes_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "e2e.json"
    assert bench.e2e(write_tiny_config(tmp_path), file, parts=True, overrides=["engine.dtype=float32"]) == 0
    report = json.loads(file.read_text())
    assert report["identical"] == report["answers"] == 8
    lengths = {name: report[name]["acceptance_length"] for name in bench.PARTS}
    assert lengths["off_plain"] == lengths["off"] == 1.0
    assert "ngram" in capsys.readouterr().out
    (root,) = tmp_path.glob("tlt-bench-*")
    assert sorted(path.name for path in root.iterdir()) == sorted(bench.PARTS)
    summaries = {name: json.loads(RunDir(root / name).summary.read_text()) for name in bench.PARTS}
    versions = {name: summary["drafter_version_by_step"][-1] for name, summary in summaries.items()}
    assert (versions["off"], versions["ngram"], versions["static"]) == (0, 0, 1)
    assert [name for name, each in summaries.items() if each["drafter_tokens_trained"]] in ([], ["on"])
    assert load_config(RunDir(root / "ngram").config).engine.speculation.drafter == "ngram"
