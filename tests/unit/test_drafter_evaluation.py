"""What a gain on held-out answers is worth: prompts are what differs, not the answers to one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.drafter_cases import DEPTH, train_steps, trainer, written
from tlt_pipeline.drafter.evaluation import HeldOut, evaluate
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.trainer import DrafterTrainer

SIBLINGS = 4


def judge(made: DrafterTrainer, documents: list[Document]) -> tuple[float, float]:
    """The gain of what was trained over what is published, and its standard error."""
    measured: list[HeldOut] = []
    for drafter in (made.average, made.published):
        found = evaluate(drafter, made.frozen, documents, depth=DEPTH, temperature=1.0, tokens_at_once=512)
        assert found is not None
        measured.append(found)
    return measured[0].gain_over(measured[1])


def test_more_answers_to_the_same_prompts_make_a_gain_no_clearer() -> None:
    made = trainer()
    train_steps(made, 10)
    prompts = [replace(document, group=number) for number, document in enumerate(written()[::6])]
    gain, error = judge(made, prompts)
    siblings = [document for document in prompts for _ in range(SIBLINGS)]
    assert judge(made, siblings) == pytest.approx((gain, error))
    others = [replace(document, group=number) for number, document in enumerate(siblings)]
    assert judge(made, others) == pytest.approx((gain, error / SIBLINGS**0.5), rel=0.15)  # few prompts: wider


def test_three_prompts_prove_nothing() -> None:
    made = trainer()
    train_steps(made, 10)
    documents = [replace(document, group=number % 3) for number, document in enumerate(written()[::6])]
    gain, error = judge(made, documents)
    assert gain > 0 and error == float("inf")


def test_answers_to_one_prompt_share_a_number_on_their_way_to_the_trainer() -> None:
    of = [document.group for document in written()]
    assert 1 < len(set(of)) < len(of)
