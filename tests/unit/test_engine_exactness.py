"""Drafter-invariance as an equality (design 5.1): nothing but policy, prompt, sampling and seed changes a token."""

from __future__ import annotations

import random
from functools import cache

import engine_cases as cases
import pytest
import torch

from tlt_pipeline.config import ConfigError
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.forward import Forward
from tlt_pipeline.engine.invariance import decide_exactness, is_batch_invariant
from tlt_pipeline.engine.layout import PLAIN, Layout, exact_layouts, plain_layout
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.engine.strategies import Fixed, parse_strategy

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
REQUESTS = [cases.request(number) for number in range(9)]


def answers(finished: list[Finished]) -> dict[str, tuple[list[int], list[float]]]:
    return {done.request.request_id: (done.tokens, done.logprobs) for done in finished}


def alone(model) -> dict[str, tuple[list[int], list[float]]]:
    """The reference: one request after the other, without a drafter."""
    return answers(decode_all(cases.engine(model, batch=1), REQUESTS))


@cache
def reference(family: str, dtype: torch.dtype) -> dict[str, tuple[list[int], list[float]]]:
    return alone(cases.policy(family, dtype))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("llama", dtype) for dtype in DTYPES),
        ("qwen2", torch.float32),
        ("qwen2", torch.bfloat16),
        ("qwen3", torch.float32),
    ],
    ids=str,
)
def test_batch_and_speculation_change_no_bit(family, dtype):
    model, expected = cases.policy(family, dtype), reference(family, dtype)
    for batch, depth, drafter in ((9, 4, None), (4, 3, cases.drafter(model)), (9, 7, cases.drafter(model))):
        engine = cases.engine(model, batch=batch, depth=depth, speculate_up_to=9)
        engine.set_drafter(drafter, 1)
        assert answers(decode_all(engine, REQUESTS)) == expected


def test_order_of_admission_changes_nothing():
    model = cases.policy()
    expected = alone(model)
    for seed in range(3):
        shuffled = random.Random(seed).sample(REQUESTS, len(REQUESTS))
        engine = cases.engine(model, batch=3)
        engine.set_drafter(cases.drafter(model), 1)
        assert answers(decode_all(engine, shuffled)) == expected


def test_drafters_swapped_and_switched_off_in_mid_answer_change_nothing():
    model = cases.policy()
    expected = alone(model)
    engine = cases.engine(model, batch=4)
    drafters = [cases.drafter(model), None, cases.drafter(model, seed=5), cases.drafter(model)]
    finished, pending, step = [], list(REQUESTS), 0
    while pending or engine.running:
        while pending and engine.room:
            engine.submit(pending.pop())
        engine.set_drafter(drafters[step % len(drafters)], step + 1)
        finished += engine.step()
        step += 1
    assert answers(finished) == expected
    versions = [done.draft.drafter_versions for done in finished]
    assert max(map(len, versions)) > 2, "answers record every drafter version they used"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", cases.FAMILIES)
@pytest.mark.parametrize("strategy", ["ngram-4", "eagle-4", "eagle-3x3x8", "eagle-5x4x16", "mixed"])
def test_strategies_change_no_bit(strategy, family, dtype):
    model = cases.policy(family, dtype)
    engine = cases.engine(model, batch=5)
    engine.set_drafter(cases.drafter(model), 1)
    engine.choice = cases.Shuffled(seed=3) if strategy == "mixed" else Fixed(parse_strategy(strategy))
    finished = decode_all(engine, REQUESTS)
    assert engine.claim == "exact"
    assert answers(finished) == reference(family, dtype)
    assert sum(done.draft.accepted for done in finished) > 0, "proposals were accepted, or this showed nothing"


@pytest.mark.parametrize("strategy", ["eagle-4", "eagle-5x4x16", "mixed"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}])
def test_greedy_and_filtered_trees_change_no_bit(strategy, sampling):
    model = cases.policy()
    requests = [cases.request(number, **sampling) for number in range(6)]
    engine = cases.engine(model, batch=6)
    engine.set_drafter(cases.drafter(model), 1)
    engine.choice = cases.Shuffled(seed=5) if strategy == "mixed" else Fixed(parse_strategy(strategy))
    assert answers(decode_all(engine, requests)) == answers(decode_all(cases.engine(model, batch=2), requests))


def test_trees_without_exactness_write_the_same_text_in_float64():
    model = cases.policy(dtype=torch.float64)
    expected = {name: tokens for name, (tokens, _) in alone(model).items()}
    for strategy in ("eagle-3x3x8", "eagle-5x4x16", "mixed"):
        engine = cases.engine(model, batch=5, exact="off")
        engine.set_drafter(cases.drafter(model), 1)
        engine.choice = cases.Shuffled(seed=6) if strategy == "mixed" else Fixed(parse_strategy(strategy))
        assert {done.request.request_id: done.tokens for done in decode_all(engine, REQUESTS)} == expected


def test_a_drafter_with_a_short_memory_changes_no_bit():
    model = cases.policy()
    expected = alone(model)
    for window in (1, 7, 40):
        engine = cases.engine(model, batch=4, context_window=window)
        engine.set_drafter(cases.drafter(model), 1)
        engine.choice = cases.Shuffled(seed=window)
        assert answers(decode_all(engine, REQUESTS)) == expected


@pytest.mark.parametrize("choice", ["goodput", "beg_mab"])
def test_timing_decides_about_speculation_and_changes_nothing(choice):
    model = cases.policy()
    engine = cases.engine(model, batch=4, choice=choice)
    engine.set_drafter(cases.drafter(model), 1)
    assert answers(decode_all(engine, REQUESTS)) == alone(model)


def test_an_abandoned_answer_comes_out_the_same_elsewhere():
    model = cases.policy()
    first = cases.engine(model, batch=4)
    for request in REQUESTS[:4]:
        first.submit(request)
    for _ in range(5):
        first.step()
    second = cases.engine(model, batch=2)
    second.set_drafter(cases.drafter(model), 1)
    expected = alone(model)
    assert answers(decode_all(second, REQUESTS[:4])) == {f"r{n}": expected[f"r{n}"] for n in range(4)}


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}])
def test_filters_are_exact_under_speculation(sampling):
    model = cases.policy()
    requests = [cases.request(number, **sampling) for number in range(6)]
    engine = cases.engine(model, batch=6)
    engine.set_drafter(cases.drafter(model), 1)
    assert answers(decode_all(engine, requests)) == answers(decode_all(cases.engine(model, batch=2), requests))


def test_start_up_check_sees_a_batch_dependent_product():
    model = cases.policy()

    class Leaky:
        """Rows feel how many there are."""

        def padded(self, rows: int) -> int:
            return rows

        def __call__(self, x, weight, bias):
            return torch.nn.functional.linear(x, weight, bias) * (1 + 1e-6 * x.shape[0])

    assert not is_batch_invariant(Forward(model, Layout(Leaky())))
    assert any(is_batch_invariant(Forward(model, layout)) for layout in exact_layouts(model))


def test_claims():
    float32, bfloat16 = cases.policy(), cases.policy(dtype=torch.bfloat16)
    assert decide_exactness(float32, "auto", 64)[1] == "exact"
    assert decide_exactness(float32, "off", 64) == (PLAIN, "float32")
    assert decide_exactness(bfloat16, "off", 64) == (plain_layout(bfloat16), "distribution")


def test_exact_on_is_refused_where_the_machine_cannot(monkeypatch):
    monkeypatch.setattr("tlt_pipeline.engine.invariance.is_batch_invariant", lambda *_: False)
    with pytest.raises(ConfigError, match=r"set engine\.exact to auto"):
        decide_exactness(cases.policy(), "on", 64)
    assert decide_exactness(cases.policy(), "auto", 64) == (PLAIN, "float32")


def test_a_wide_tree_fits_behind_the_longest_answer():
    """What is drafted takes more places than what is verified."""
    model = cases.policy()
    engine = cases.engine(model, exact="off", trees=("6x16x16",))
    prompt = cases.request(0).prompt.length
    requests = [cases.request(0, max_new_tokens=200 - prompt, stop_token_ids=())]
    expected = [done.tokens for done in decode_all(engine, requests)]
    assert len(expected[0]) == 200 - prompt
    engine.set_drafter(cases.drafter(model), 1)
    engine.choice = Fixed(parse_strategy("eagle-6x16x16"))
    assert [done.tokens for done in decode_all(engine, requests)] == expected
