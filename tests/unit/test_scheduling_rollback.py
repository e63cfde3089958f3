"""A drafter version that drafts clearly worse than the one before is taken back, and nothing else is."""

from __future__ import annotations

import pytest

from tests.unit.scheduling_driver import Driver
from tlt_pipeline.messages import DrafterUse
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.rollback import ENOUGH_DRAFTS, is_clearly_worse
from tlt_pipeline.scheduling.state import Duel


def run_with(*versions: int, **settings: int) -> Driver:
    run = Driver(**{"group_size": 20, **settings})
    run.start()
    for version in versions:
        run.weights("drafter", version)
    return run


def answer(run: Driver, index: int, *uses: tuple[int, int, int]) -> None:
    drafters = tuple(DrafterUse(version=version, drafts=drafts, hits=hits) for version, drafts, hits in uses)
    run.answer(0, index, drafters=drafters)


def test_the_better_version_is_published_again_once() -> None:
    run = run_with(1, 2)
    for index in range(12):
        answer(run, index, (1, 30, 24), (2, 30, 15))
    assert run.look(e.RollBack) == [e.RollBack(0, version=2, to=1)]
    assert run.state.account.counts["drafter_rolled_back"] == 1
    run.weights("drafter", 3)
    answer(run, 12, (2, 300, 150), (3, 300, 240))
    answer(run, 13, (1, 300, 290), (2, 300, 0))  # of a version that is no longer used
    assert run.look(e.RollBack) == []


def test_versions_of_different_answers_are_not_compared() -> None:
    run = run_with(1, 2)
    for index in range(5):
        answer(run, index, (1, 200, 190))
        answer(run, index + 5, (2, 200, 20))
    assert run.look(e.RollBack) == []


def test_the_same_answer_twice_counts_once() -> None:
    run = run_with(1, 2)
    for _ in range(12):
        answer(run, 0, (1, 30, 24), (2, 30, 15))
    assert run.look(e.RollBack) == []


def test_without_a_trainer_it_waits_for_one() -> None:
    run = Driver(group_size=20)
    run.start(trainers=False)
    run.weights("drafter", 1)
    run.weights("drafter", 2)
    for index in range(12):
        answer(run, index, (1, 30, 24), (2, 30, 15))
    assert run.look(e.RollBack) == []
    run.started("drafter-trainer", 1)
    assert run.look(e.RollBack) == [e.RollBack(1, version=2, to=1)]


@pytest.mark.parametrize(
    ("duel", "worse"),
    [
        (Duel(ENOUGH_DRAFTS, 160, ENOUGH_DRAFTS, 100), True),
        (Duel(ENOUGH_DRAFTS - 1, 160, ENOUGH_DRAFTS, 100), False),  # too little seen
        (Duel(200, 100, 200, 80), False),  # may be chance
        (Duel(100_000, 80_000, 100_000, 76_000), False),  # certain, but little
        (Duel(200, 100, 200, 160), False),
        (Duel(200, 0, 200, 0), False),
    ],
)
def test_clearly_worse_is_certain_and_by_much(duel: Duel, worse: bool) -> None:
    assert is_clearly_worse(duel) is worse
