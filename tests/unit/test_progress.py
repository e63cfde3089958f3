"""What a run shows: the live table, the log lines, the summary, the status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from structlog.testing import capture_logs

from tlt_pipeline.scheduling.records import StepRecord
from tlt_pipeline.scheduling.spot import spot_facts
from tlt_pipeline.scheduling.state import Account
from tlt_pipeline.scheduling.status import RunStatus, SlotStatus
from tlt_pipeline.telemetry.report import print_summary, sparkline, spot_rows
from tlt_services.progress import LiveTable, StepLines, render_status


def a_status(**changes: Any) -> RunStatus:
    slots = (
        SlotStatus(
            slot=0,
            holder="rollout",
            lease=3,
            rollout="up",
            trainer="up",
            running=5,
            tokens_per_s=321.4,
            policy_version=4,
            drafter_version=2,
        ),
        SlotStatus(
            slot=1,
            holder="drafter",
            lease=4,
            rollout="lost",
            trainer="up",
            running=0,
            tokens_per_s=0.0,
            policy_version=-1,
            drafter_version=-1,
        ),
    )
    facts: dict[str, Any] = {
        "run": "tiny-12ab",
        "at": 0.0,
        "phase": "rollout",
        "reason": None,
        "waiting_for": None,
        "step": 4,
        "steps": 20,
        "answers_done": 96,
        "answers": 128,
        "reward": 0.4375,
        "reward_so_far": 0.5,
        "policy_version": 4,
        "drafter_version": 2,
        "acceptance_length": 3.126,
        "tokens_per_s": 321.4,
        "eta_s": 125.0,
        "dead_letters": 0,
        "slots": slots,
    }
    return RunStatus.model_validate({**facts, **changes})


def a_record(step: int, **changes: Any) -> str:
    facts: dict[str, Any] = {name: 0 for name, field in StepRecord.model_fields.items() if field.is_required()}
    facts |= {"step": step, "reward": 0.25, "answer_lengths": (), "policy_version": step + 1, **changes}
    return StepRecord.model_validate(facts).model_dump_json() + "\n"


def drawn(content: RenderableType, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 closed with the test
    console.print(content)
    return console.export_text()


def test_the_table_says_where_the_run_stands() -> None:
    shown = drawn(render_status(a_status()))
    for part in (
        "step 5 of 20",
        "2:05 left",
        "96/128 answers",
        "mean reward 0.438 (this step so far 0.500)",
        "acceptance length 3.13",
        "321 tokens/s",
        "policy v4",
        "drafter v2",
        "lost: rollout",
    ):
        assert part in shown
    slots = [line.split() for line in shown.splitlines() if line.strip().startswith(("0 ", "1 "))]
    assert slots[0] == ["0", "rollout", "5", "321", "v4", "v2"]
    assert slots[1][:6] == ["1", "drafter", "0", "0", "–", "–"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"waiting_for": "a rollout worker"}, "waiting for a rollout worker"),
        ({"phase": "failed", "reason": "learner: NaN"}, "learner: NaN"),
        ({"dead_letters": 2}, "2 dead letters"),
        ({"eta_s": 7325.0}, "2:02:05 left"),
        ({"reward": None, "reward_so_far": None, "eta_s": None}, "mean reward –"),
        ({"step": 20, "phase": "finished"}, "step 20 of 20"),
    ],
)
def test_the_table_says_what_is_the_matter(changes: dict[str, Any], text: str) -> None:
    assert text in drawn(render_status(a_status(**changes)))


def test_the_live_table_scrolls_steps_and_is_gone_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with LiveTable(metrics, Console(stderr=True, force_terminal=True, width=100)) as progress:
        progress.update(None)
        metrics.write_text(a_record(4, reward=0.4375, acceptance_length=3.0))
        progress.update(a_status())
    shown = capfd.readouterr().err
    assert "starting the processes" in shown
    assert "step    5  reward 0.438  acceptance length 3.00" in shown
    assert "96/128" in shown
    assert "96/128" not in shown.rsplit("\x1b[2K", 1)[-1]  # erased


def test_one_line_a_step_and_none_twice(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(a_record(0))  # of an earlier life of the run
    with capture_logs() as lines, StepLines(metrics) as progress:
        progress.update(a_status(waiting_for="the learner (tlt learner)"))
        with metrics.open("a") as file:
            file.write(a_record(1, acceptance_length=2.5) + a_record(2)[:40])
        progress.update(a_status())
        progress.update(a_status())
        with metrics.open("a") as file:
            file.write(a_record(2)[40:] + a_record(3, dead_letters=1, eval_reward=0.5))
    assert [line["event"] for line in lines] == ["waiting", "step", "step", "step"]
    first, _, last = lines[1:]
    assert first["step"] == 2
    assert first["acceptance_length"] == 2.5
    assert first["slots"] == "0:rollout 1:drafter"
    assert first["left_s"] == 125
    assert (last["step"], last["dead_letters"], last["eval_reward"]) == (4, 1, 0.5)


def test_metrics_written_anew_are_not_told_again(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(a_record(0) + a_record(1) + a_record(2))
    with capture_logs() as lines, StepLines(metrics) as progress:
        metrics.write_text(a_record(0))
        progress.update(a_status())
        with metrics.open("a") as file:
            file.write(a_record(1))
        progress.update(a_status())
    assert [line["step"] for line in lines] == [2]


def test_the_summary_names_numbers_and_next_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {
        "steps": 20,
        "reward_first": 0.41,
        "reward_last": 0.72,
        "reward_by_step": [0.4, 0.5, 0.7],
        "policy_version": 20,
        "drafter_versions_published": 5,
        "acceptance_length_first": 1.9,
        "acceptance_length_last": 3.4,
        "rollout_s": 80.0,
        "learner_s": 20.0,
        "step_s": 110.0,
        "slot_idle_s": 30.0,
        "slot_idle_used_s": 21.0,
        "requests_admitted": 2560,
        "requests_trained": 2560,
        "dead_letters": 0,
        "answer_length_p50": 40,
        "answer_length_p99": 210,
        "claim": "exact",
    }
    print_summary(json.loads(json.dumps(summary)), tmp_path, Console(width=200))
    shown = capsys.readouterr().out
    for part in (
        "0.410 → 0.720",
        "5 versions, acceptance length 1.90 → 3.40",
        "30.0 s, 70% of it used for the drafter",
        "2560 trained of 2560, 0 dead letters",
        "p50 40, p99 210 tokens",
        str(tmp_path),
        f"tlt replay {tmp_path} --sample 32 --drafter none",
        f"tlt run --resume {tmp_path}",
    ):
        assert part in shown


def test_the_spot_trainers_facts_are_told_in_three_lines() -> None:
    account = Account(
        idle_s=30.0,
        used_s=21.0,
        unused_s={"trainer_yielded_budget_no_gain": 6.0},
        drafter_tokens=1234,
        yields=2,
        yield_seconds=(0.01, 0.2),
        drafter_wait_s=0.25,
        drafter_versions=5,
        counts={"drafter_refused_not_better": 3, "drafter_merge_tried": 4, "drafter_merge_better": 1},
    )
    shown = dict(spot_rows(spot_facts([], account)))
    assert shown["idle slots"] == (
        "30.0 s, 70% of it used for the drafter; seconds without a trainer (trainer yielded budget no gain 6.0)"
    )
    assert shown["given back"].startswith("p50 0.010, p99 0.200 s after the order; the learner waited 0.2 s")
    assert shown["spot trainer"] == (
        "1234 tokens, 5 versions published, 3 refused (not better 3); 1 of 4 merges better"
    )


def test_sparkline_spans_low_to_high_in_bounded_width() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0]) == ""
    assert len(sparkline([float(value) for value in range(1000)])) == 40
    assert sparkline([2.0, 2.0]) == "▁▁"
