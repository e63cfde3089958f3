"""`tlt bench drafter`: its report from recorded runs, and greedy proposals beside those of the policy's noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_cases as cases
import pytest
import yaml

from tests import samples
from tests.tiny import tiny_settings
from tests.unit.bench_cases import write_run
from tlt_pipeline.bus.journal import Journal
from tlt_pipeline.config import ConfigError, RunConfig, validate_config
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.engine.strategies import Fixed, parse_strategy
from tlt_pipeline.messages import Array
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.scheduling.state import Account
from tlt_pipeline.weights import WeightStore
from tlt_services import bench_drafter, bench_proposals

STATIC, ADAPTIVE = (40, 36, 30, 24, 20), (40, 42, 44, 46, 48)
"""Proposals accepted in 20 verify passes, by step."""


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    used = Account(idle_s=1.0, used_s=0.75, drafter_tokens=100, drafter_versions=1)
    static = write_run(tmp_path / "static", STATIC, Account(idle_s=1.5))
    return static, write_run(tmp_path / "adaptive", ADAPTIVE, used)


def test_the_report_sets_both_runs_beside_each_other(runs: tuple[Path, Path]) -> None:
    report = bench_drafter.compare(*runs)
    assert report["steps"] == [0, 1, 2, 3, 4]
    assert report["static"]["acceptance_length_by_step"] == [3.0, 2.8, 2.5, 2.2, 2.0]
    assert report["adaptive"]["acceptance_length_by_step"] == pytest.approx([3.0, 3.1, 3.2, 3.3, 3.4])
    assert report["adaptive"]["drafter_version_by_step"] == [1, 2, 3, 4, 5]
    assert report["static"]["drafter_version_by_step"] == [1] * 5
    assert report["gain_last"] == pytest.approx(3.3 / (6.7 / 3))
    assert (report["static"]["slot_idle_s"], report["static"]["slot_idle_used_s"]) == (7.5, 0.0)
    assert (report["adaptive"]["slot_idle_s"], report["adaptive"]["slot_idle_used_s"]) == (5.0, 3.75)
    assert (report["answers"], report["identical"], report["reward_curves_equal"]) == (5, 5, True)
    assert report["strategy"] == "eagle-6"


def test_an_answer_that_differs_is_counted(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, STATIC, Account(), tokens) for name, tokens in (("static", 8), ("adaptive", 9))]
    report = bench_drafter.compare(paths[0], paths[1])
    assert (report["answers"], report["identical"]) == (5, 4)


def test_table_and_plot_are_made_of_the_report(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"acceptance_length": 2.5, "acceptance_by_position": [0.9, 0.6], "verify_passes": 9}
    proposals = {"policy_version": 4, "drafter_version": 5, "answers": 5, "identical": 5}
    report = {**bench_drafter.compare(*runs), "proposals": {**proposals, "shared_noise": figures, "greedy": figures}}
    bench_drafter.show(report, tmp_path)
    said = capsys.readouterr().out
    assert "kinds of drafters" not in said
    assert "static 2.23, adaptive 3.30, ratio 1.48" in said
    assert "5 of 5 answers identical (claim: exact)" in said
    assert "greedy        acceptance length 2.50, by position 0.900 0.600" in said
    bench_drafter.draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_kinds_have_a_row_each(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"acceptance_length": 2.5, "acceptance_by_position": [0.9, 0.6], "verify_passes": 9}
    proposals = {"policy_version": 4, "drafter_version": 5, "answers": 5, "identical": 5}
    kind = {"parameters": 12_345, "tokens_per_s": 678.4, "start": figures}
    kind |= {f"equal_{name}": {**figures, "tokens": 41_000, "seconds": 60.4} for name in ("tokens", "seconds")}
    report = {
        **bench_drafter.compare(*runs),
        "proposals": {**proposals, "shared_noise": figures, "greedy": figures},
        "kinds": {"answers": 96, "held_out": 64, "strategy": "eagle-6", "eagle": kind, "eagle3": kind},
    }
    bench_drafter.show(report, tmp_path)
    said = capsys.readouterr().out
    assert "same 96 answers; acceptance length of eagle-6 on 64 other prompts" in said
    rows = [line.split() for line in said.splitlines() if "12,345" in line]
    assert [row[1] for row in rows] == ["eagle", "eagle3"]
    assert " ".join(rows[1]).endswith("│ 2.50 │ 2.50 (60 s) │ 2.50 (41 k) │")
    assert "41 k tokens each" in said and "60 s each" in said
    bench_drafter.draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [1, 12, 13, 40])
def test_rows_of_the_table_cover_every_step_once(steps: int) -> None:
    rows = bench_drafter.blocks(steps)
    assert [step for first, end in rows for step in range(first, end)] == list(range(steps))
    assert len(rows) <= bench_drafter.ROWS


def config(**changes: Any) -> RunConfig:
    return validate_config(tiny_settings(Path("nowhere"), **changes))


def test_both_runs_draft_alike_and_one_trains() -> None:
    variants = bench_drafter.variants_of(config(engine__max_batch=9))
    assert set(variants["static"]) ^ set(variants["adaptive"]) == {
        "drafter.train.enabled=false",
        "drafter.train.enabled=true",
    }
    assert {"engine.speculation.choice=fixed", "engine.speculation.max_batch=9"} < set(variants["static"])
    with pytest.raises(ConfigError, match="set it to eagle"):
        bench_drafter.variants_of(config(engine__speculation__drafter="ngram"))


# --- greedy proposals -------------------------------------------------------------------------------------------------


def accepted(answers: list[Finished]) -> int:
    return sum(answer.draft.accepted for answer in answers)


def decode_twice(strategy: str, temperature: float) -> tuple[list[Finished], list[Finished]]:
    model = cases.policy()
    engine = cases.engine(model)
    engine.choice = Fixed(parse_strategy(strategy))
    engine.set_drafter(cases.drafter(model), 1)
    requests = [cases.request(number, temperature=temperature) for number in range(8)]
    shared = decode_all(engine, requests)
    assert engine.drafting is not None
    engine.drafting = replace(engine.drafting, greedy=True)
    return shared, decode_all(engine, requests)


@pytest.mark.parametrize("strategy", ["eagle-4", "eagle-3x3x8"])
def test_greedy_proposals_change_no_token_and_are_accepted_less(strategy: str) -> None:
    shared, greedy = decode_twice(strategy, temperature=1.0)
    assert [answer.tokens for answer in greedy] == [answer.tokens for answer in shared]
    assert 0 < accepted(greedy) < accepted(shared)


def test_without_temperature_there_is_no_noise_to_share() -> None:
    shared, greedy = decode_twice("eagle-4", temperature=0.0)
    assert [answer.draft for answer in greedy] == [answer.draft for answer in shared]


def test_recorded_answers_are_decoded_with_both(tmp_path: Path) -> None:
    run, model = RunDir(tmp_path), cases.policy()
    settings = tiny_settings(Path("nowhere"), engine__max_context=200, engine__dtype="float32")
    settings["engine"]["speculation"] = {"depth": 3}
    run.config.write_text(yaml.safe_dump(settings))
    store = WeightStore.of_run(run.root, validate_config(settings))
    store.write_policy(0, model, cases.tokenizer(), parent=0, step=0)
    store.write_drafter(2, cases.drafter(model), parent=1, policy_version=0, step=0)
    with Journal(run.journal) as journal:
        for done in decode_all(cases.engine(model), [cases.request(number) for number in range(6)]):
            journal.append(done.request)
            journal.append(samples.completion(done.request, tokens=Array.of(done.tokens)))
    found = bench_proposals.compare_proposals(tmp_path)
    facts = [found[name] for name in ("policy_version", "drafter_version", "answers", "identical")]
    assert facts == [0, 2, 6, 6]
    shared, greedy = found["shared_noise"], found["greedy"]
    assert shared["acceptance_length"] > greedy["acceptance_length"] > 1
    assert len(shared["acceptance_by_position"]) == 3
    assert shared["acceptance_length"] == pytest.approx(1 + sum(shared["acceptance_by_position"]))
