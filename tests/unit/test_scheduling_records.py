"""Names and seeds of requests, records of steps, and the summary made of them."""

from __future__ import annotations

from typing import Any

import pytest

from tlt_pipeline.scheduling.ids import RequestId, parse_request_id, seed_of
from tlt_pipeline.scheduling.records import (
    StepRecord,
    account_facts,
    answer_facts,
    mean,
    percentile,
)
from tlt_pipeline.scheduling.state import Account, Answer
from tlt_pipeline.scheduling.summary import summarise


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s00003-p004-05", ("train", 3, 4, 5)),
        ("e00020-p063-00", ("eval", 20, 63, 0)),
        ("s123456-p1234-123", ("train", 123456, 1234, 123)),
    ],
)
def test_request_ids_read_back(text: str, parts: tuple[Any, ...]) -> None:
    name = parse_request_id(text)
    assert name == RequestId(*parts) and str(name) == text and text.startswith(name.group)


@pytest.mark.parametrize("text", ["", "s3-p004-05", "x00003-p004-05", "s00003-p004-05 ", "s00003-p004"])
def test_other_texts_are_no_request_ids(text: str) -> None:
    assert parse_request_id(text) is None


def test_seeds_are_63_bits_and_differ_between_requests_and_runs() -> None:
    names = [str(RequestId("train", step, prompt, 0)) for step in range(50) for prompt in range(20)]
    seeds = {seed_of(seed, name) for seed in (0, 1) for name in names}
    assert len(seeds) == 2000 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(7, names[0]) == seed_of(7, names[0])


def test_percentiles_are_lengths_that_occurred() -> None:
    lengths = {10: 98, 50: 1, 400: 1}
    assert (percentile(lengths, 0.5), percentile(lengths, 0.99), percentile(lengths, 1.0)) == (10, 50, 400)
    assert percentile({}, 0.5) == 0 and percentile({3: 1}, 0.99) == 3


def test_means_do_not_depend_on_the_order_of_arrival() -> None:
    values = [0.1, 1e16, 0.3, -1e16, 0.7] * 3
    assert mean(values) == mean(sorted(values)) == mean(values[::-1])


def record(step: int, **changes: Any) -> StepRecord:
    answers = [Answer(step / 10, 10 + step, 4, 2 * step, verified=True)]
    facts: dict[str, Any] = {
        "step": step,
        "policy_version": step + 1,
        "rollout_version": step,
        "requests_admitted": 1,
        "requests_trained": 1,
        "requests_dead": 0,
        "tokens_per_s": 5.0,
        "rollout_s": 2.0,
        "yield_wait_s": 0.1,
        "learner_s": 1.0,
        "step_s": 3.5,
        **answer_facts(answers),
        **account_facts(
            Account(
                idle_s=1.0, used_s=0.75, drafter_versions=2, yields=1, yield_seconds=(0.1 * step,), drafter_wait_s=0.05
            )
        ),
    }
    return StepRecord(**(facts | changes))


def test_the_summary_has_the_fields_that_users_read() -> None:
    records = [record(step, eval_reward=0.5 if step == 0 else None) for step in range(6)]
    since = Account(idle_s=0.5, used_s=0.25, drafter_versions=1, dead_letters=1, counts={"late_yields": 1})
    summary = summarise(records, since, {6: 0.9})
    expected = {
        "steps": 6,
        "reward_by_step": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
        "policy_version": 6,
        "drafter_versions_published": 13,
        "rollout_s": 12.0,
        "learner_s": 6.0,
        "step_s": 21.0,
        "slot_idle_s": 6.5,
        "slot_idle_used_s": 4.75,
        "requests_admitted": 6,
        "requests_trained": 6,
        "dead_letters": 1,
        "answer_length_p50": 12,
        "answer_length_p99": 15,
        "eval_reward_by_version": {"0": 0.5, "6": 0.9},
    }
    assert {name: summary[name] for name in expected} == expected
    assert (summary["reward_first"], summary["reward_last"]) == (pytest.approx(0.1), pytest.approx(0.4))
    assert (summary["acceptance_length_first"], summary["acceptance_length_last"]) == (1.5, 3.0)
    assert summary["counts"] == {"late_yields": 1} and summary["late_yields"] == 1
    assert (summary["yield_s_p50"], summary["yield_s_p99"]) == (pytest.approx(0.2), pytest.approx(0.5))
    assert summary["drafter_wait_share"] == pytest.approx(0.3 / 21.0)


def test_a_run_without_steps_has_a_summary_too() -> None:
    summary = summarise([], Account(), {})
    assert summary["steps"] == 0 and summary["reward_first"] == 0.0 and summary["answer_length_p99"] == 0
