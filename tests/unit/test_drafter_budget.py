"""An idle slot trains only while it pays."""

from __future__ import annotations

from tlt_pipeline.config import BudgetConfig
from tlt_pipeline.drafter.budget import NO_GAIN, RESTING, Budget

SETTINGS = BudgetConfig(patience_s=4.0, wake_drop=0.05, longest_rest=4)


def stopped(length: float = 3.0) -> Budget:
    """A budget whose training has just stopped for want of gain."""
    budget = Budget(SETTINGS)
    assert [budget.note(1.0, length, worth=False) for _ in range(4)] == [None, None, None, NO_GAIN]
    return budget


def test_training_that_keeps_gaining_goes_on_for_ever() -> None:
    budget = Budget(SETTINGS)
    for number in range(100):
        assert budget.note(1.0, 3.0, worth=number % 3 == 0) is None
        assert budget.begin(None) is None


def test_time_without_gain_adds_up_over_leases() -> None:
    budget = Budget(SETTINGS)
    for _ in range(7):
        assert budget.begin(3.0) is None
        assert budget.note(0.5, 3.0, worth=False) is None
    assert budget.note(0.5, 3.0, worth=False) == NO_GAIN


def test_it_rests_and_tries_again_ever_more_seldom() -> None:
    budget = stopped()
    rests = []
    for _ in range(5):
        rests.append(0)
        while budget.begin(3.0) == RESTING:
            rests[-1] += 1
        assert budget.note(1.0, 3.0, worth=False) == NO_GAIN, "a try is short"
    assert rests == [1, 2, 4, 4, 4]


def test_a_look_without_training_changes_nothing() -> None:
    budget = stopped()
    assert budget.note(0.0, 3.0, worth=False) is None
    assert [budget.begin(3.0), budget.begin(3.0)] == [RESTING, None]


def test_a_try_may_take_several_leases() -> None:
    budget = stopped()
    assert budget.begin(3.0) == RESTING
    told = []
    for _ in range(4):
        told.append(budget.begin(3.0))
        told.append(budget.note(0.25, 3.0, worth=False))
    assert told == [None] * 7 + [NO_GAIN]


def test_a_try_that_gains_ends_the_rests() -> None:
    budget = stopped()
    assert [budget.begin(3.0), budget.begin(3.0)] == [RESTING, None]
    assert budget.note(0.5, 3.1, worth=True) is None
    assert not budget.is_resting
    assert [budget.note(1.0, 3.1, worth=False) for _ in range(3)] == [None] * 3, "the whole patience again"


def test_a_drafter_that_went_stale_is_trained_at_once() -> None:
    budget = stopped(length=3.0)
    assert budget.begin(2.9) == RESTING
    budget = stopped(length=3.0)
    assert budget.begin(2.8) is None and not budget.is_resting
    assert [budget.note(1.0, 2.8, worth=False) for _ in range(3)] == [None] * 3


def test_without_held_out_data_a_rest_is_counted_only() -> None:
    budget = stopped()
    assert [budget.begin(None), budget.begin(None)] == [RESTING, None]


def test_without_patience_it_never_stops() -> None:
    budget = Budget(BudgetConfig(patience_s=0.0))
    assert all(budget.note(100.0, 3.0, worth=False) is None for _ in range(50))
