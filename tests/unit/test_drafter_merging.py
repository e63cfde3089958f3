"""Slots' work made into one: what is averaged with which weight, and when a merge is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit import engine_cases
from tests.unit.drafter_cases import one_thread, policy, train_steps, trainer, written  # noqa: F401
from tlt_pipeline.drafter.merging import ROLLED_BACK, Lineage, Work, merge
from tlt_pipeline.drafter.state import LeftBehind, state_path, take_snapshot, write_snapshot
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.messages import WeightsPublished
from tlt_pipeline.models.drafter import EagleDrafter


def version(number: int, parent: int, tokens: int = 0, **metrics: float) -> WeightsPublished:
    facts = {"policy_version": 0, "step": 0, "path": "", "size": 0, "sha256": ""}
    metrics = {"tokens_trained": float(tokens), **metrics}
    return WeightsPublished(model="drafter", version=number, parent=parent, metrics=metrics, **facts)


def lineage(*versions: WeightsPublished) -> Lineage:
    made = Lineage()
    for each in versions:
        made.note(each)
    return made


def filled(value: float) -> EagleDrafter:
    made = engine_cases.drafter(policy(), seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def value_of(drafter: EagleDrafter | None) -> float:
    assert drafter is not None
    values = {float(parameter.detach().unique()) for parameter in drafter.parameters()}
    assert len(values) == 1
    return values.pop()


def test_changes_are_averaged_by_the_tokens_behind_them() -> None:
    heard = lineage(version(1, 0))
    works = [Work(filled(4.0), 1, 300), Work(filled(0.0), 1, 100), Work(filled(9.0), 1, 0)]
    assert value_of(merge(works, heard)) == pytest.approx(3.0)
    assert merge(works[1:], heard) is None, "one alone is no merge"


def test_what_was_published_meanwhile_counts_with_all_that_led_to_it() -> None:
    """Versions 2 and 3 were made from 1 while a slot trained from 1."""
    heard = lineage(version(1, 0), version(2, 1, 100), version(3, 2, 200))
    own, published = Work(filled(8.0), 1, 100), Work(filled(4.0), 3, 0)
    assert value_of(merge([own, published], heard)) == pytest.approx(5.0)
    on_top = Work(filled(8.0), 3, 100)
    assert merge([on_top, published], heard) is None, "nothing to merge with: it comes from the published one"


def test_without_a_known_common_version_nothing_is_merged() -> None:
    heard = lineage(version(8, 7, 10), version(9, 5, 10))  # heard of too late to know what 7 and 5 came from
    assert merge([Work(filled(1.0), 8, 10), Work(filled(2.0), 9, 10)], heard) is None
    siblings = lineage(version(8, 7, 10), version(9, 7, 30))
    assert value_of(merge([Work(filled(1.0), 8, 0), Work(filled(2.0), 9, 0)], siblings)) == pytest.approx(1.75)


def test_what_comes_from_a_version_that_was_rolled_back_is_known() -> None:
    heard = lineage(version(1, 0), version(2, 1, 5), version(3, 2, 5), version(4, 1, **{ROLLED_BACK: 2.0}))
    assert [heard.is_refused(number) for number in (1, 2, 3, 4)] == [False, True, True, False]


def slots_work(*, steps: int, share: int) -> DrafterTrainer:
    """A slot that trained on every third document."""
    made = trainer(filled=False)
    made.buffer.add(written(144)[::4], 0, held_out=True)
    made.buffer.add([each for index, each in enumerate(written(144)) if index % 4 and index % 3 == share], 0, False)
    train_steps(made, steps)
    return made


def test_a_merge_that_beats_all_its_members_is_published_and_trained_on_from() -> None:
    heard = lineage(version(1, 0))
    one, two = slots_work(steps=12, share=0), slots_work(steps=12, share=1)
    other = Work(two.candidate().drafter, two.parent, two.tokens_since_parent)
    judged = one.judge(others=[other], lineage=heard)
    assert judged is not None and judged.worth and judged.better is not None
    alone = two.judge()
    assert alone is not None
    assert judged.candidate.loss < min(judged.own.loss, alone.own.loss, judged.published.loss)
    assert one.counts["merge_tried"] == one.counts["merge_better"] == 1

    candidate = one.candidate(judged)
    assert (candidate.parent, candidate.tokens_trained) == (1, one.tokens_trained + two.tokens_trained)
    one.adopt(2, candidate)
    assert torch.allclose(one.average.fc.weight, candidate.drafter.fc.weight, atol=1e-6)
    assert one.parent == one.version == 2 and one.tokens_since_parent == 0
    train_steps(one, 1)
    again = one.judge(lineage=heard)
    assert again is not None and again.own.loss < judged.published.loss


def test_a_merge_no_better_than_its_best_member_is_dropped() -> None:
    heard = lineage(version(1, 0))
    one = slots_work(steps=30, share=0)
    poor = Work(filled(0.3), 1, 10 * one.tokens_since_parent)
    judged = one.judge(others=[poor], lineage=heard)
    assert judged is not None and judged.worth and judged.better is None
    assert (one.counts["merge_tried"], one.counts["merge_better"]) == (1, 0)
    assert one.candidate(judged).tokens_trained == one.tokens_since_parent


def test_a_slot_that_has_learned_nothing_publishes_what_another_left_behind() -> None:
    heard = lineage(version(1, 0))
    idle, two = slots_work(steps=0, share=0), slots_work(steps=20, share=1)
    other = Work(two.candidate().drafter, two.parent, two.tokens_since_parent)
    judged = idle.judge(others=[other], lineage=heard)
    assert judged is not None and judged.worth and judged.better is other
    idle.adopt(2, idle.candidate(judged))
    assert torch.allclose(idle.drafter.fc.weight, other.drafter.fc.weight, atol=1e-6)


def test_a_line_that_began_again_while_its_work_was_published_stays_where_it_is() -> None:
    one = slots_work(steps=5, share=0)
    candidate = one.candidate()
    one.restart_from_published()
    one.adopt(2, candidate)
    assert (one.version, one.parent, one.tokens_since_parent) == (2, 1, 0)
    assert one.choose_start(None) and one.parent == 2


def test_states_of_other_slots_are_read_once_each_time_they_are_written(tmp_path: Path) -> None:
    two = slots_work(steps=3, share=1)
    write_snapshot(take_snapshot(two), state_path(tmp_path, 1))
    write_snapshot(take_snapshot(slots_work(steps=0, share=0)), state_path(tmp_path, 2))
    state_path(tmp_path, 3).write_bytes(b"torn")
    behind = LeftBehind(state_path(tmp_path, 0))
    found = behind.read(two.published)
    assert [(work.parent, work.tokens) for work in found] == [(1, two.tokens_since_parent)]
    assert torch.equal(found[0].drafter.fc.weight, two.average.fc.weight)
    assert behind.counts["state_of_another_slot_unusable"] == 1
    assert behind.read(two.published) == []
    train_steps(two, 1)
    write_snapshot(take_snapshot(two), state_path(tmp_path, 1))
    assert len(behind.read(two.published)) == 1
    assert LeftBehind(state_path(tmp_path, 1)).read(two.published) == [], "its own isn't another's"
