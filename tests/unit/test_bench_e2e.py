"""`tlt bench e2e`: its report from recorded runs, and which part of the whole each run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_settings
from tests.unit.bench_cases import write_run
from tlt_pipeline.config import ConfigError, RunConfig, validate_config
from tlt_pipeline.scheduling.state import Account
from tlt_services import bench

ROLLOUT_S = {
    "off_plain": (8.0, 6.0, 6.0),
    "off": (9.0, 6.5, 6.5),
    "ngram": (8.0, 5.0, 5.0),
    "static": (6.0, 3.0, 3.0),
    "on": (6.0, 2.0, 2.0),
}


def write_runs(root: Path, names: dict[str, Any], **last_tokens: int) -> dict[str, Path]:
    return {
        name: write_run(root / name, (10, 20, 30), Account(), last_tokens.get(name, 8), ROLLOUT_S[name])
        for name in names
    }


def test_three_runs_give_the_report_that_they_always_gave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench.compare(write_runs(tmp_path, bench.VARIANTS))
    assert report.keys() == {
        *("off_plain", "off", "on", "rollout_ratio", "step_ratio"),
        *("answers", "identical", "reward_curves_equal"),
    }
    figures = {"rollout_s", "learner_s", "step_s", "acceptance_length", "reward_by_step"}
    assert report["on"].keys() == figures
    assert (report["answers"], report["identical"], report["reward_curves_equal"]) == (5, 5, True)
    assert (report["rollout_ratio"], report["step_ratio"]) == (2.0, pytest.approx(23 / 13))
    bench.show(report, tmp_path)
    assert "answers identical between off and on" in " ".join(capsys.readouterr().out.split())


def test_every_part_has_its_row_with_its_ratio_to_off_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench.compare(write_runs(tmp_path, bench.PARTS))
    assert [report[name]["rollout_ratio"] for name in bench.PARTS] == pytest.approx([1, 20 / 22, 20 / 18, 20 / 12, 2])
    assert report["on"]["rollout_ratio_after_first"] == 3.0
    assert report["static"]["step_ratio"] == pytest.approx(23 / 15)
    assert report["static"]["step_ratio_after_first"] == pytest.approx(14 / 8)
    assert report["ngram"]["learner_ratio"] == 1.0
    assert report["on"]["rollout_ratio"] == report["rollout_ratio"]
    bench.show(report, tmp_path)
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["off_plain", "off", "ngram", "static", "on"]
    assert " ".join(rows[-1]).endswith("│ 2.00 (3.00) │ 1.77 (2.33) │")


def test_an_answer_that_differs_in_any_exact_run_is_counted(tmp_path: Path) -> None:
    report = bench.compare(write_runs(tmp_path, bench.PARTS, ngram=9))
    assert (report["answers"], report["identical"], report["identical_in_off_plain"]) == (5, 4, 5)


def test_answers_of_the_baseline_may_differ(tmp_path: Path) -> None:
    report = bench.compare(write_runs(tmp_path, bench.PARTS, off_plain=9))
    assert (report["answers"], report["identical"], report["identical_in_off_plain"]) == (5, 5, 4)


def test_one_step_has_no_ratio_without_the_first(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, (10,), Account(), rollout_s=ROLLOUT_S[name][:1]) for name in bench.PARTS}
    report = bench.compare(runs)
    assert "rollout_ratio_after_first" not in report["on"]
    bench.show(report, tmp_path)


def config(**changes: Any) -> RunConfig:
    return validate_config(tiny_settings(Path("nowhere"), **changes))


def changed(settings: tuple[str, ...]) -> RunConfig:
    pairs = dict(setting.split("=") for setting in settings)
    return config(
        **{key.replace(".", "__"): {"true": True, "false": False}.get(value, value) for key, value in pairs.items()}
    )


def test_each_run_has_one_part_more_than_the_one_before() -> None:
    runs = {name: changed(settings) for name, settings in bench.PARTS.items()}
    parts = {name: (run.engine.exact, run.engine.speculation.drafter, run.trains_drafter) for name, run in runs.items()}
    assert parts == {
        "off_plain": ("off", "off", False),
        "off": ("auto", "off", False),
        "ngram": ("auto", "ngram", False),
        "static": ("auto", "eagle", False),
        "on": ("auto", "eagle", True),
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"drafter__train__enabled": False}, "leave --parts out"),
        ({"engine__speculation__drafter": "ngram"}, "set engine.speculation.drafter to eagle"),
        ({"engine__speculation__ngram_depths": []}, "ngram_depths is empty"),
    ],
)
def test_a_config_without_the_parts_is_refused(changes: dict[str, Any], text: str) -> None:
    bench.check_parts(config())
    with pytest.raises(ConfigError, match=text):
        bench.check_parts(config(**changes))
