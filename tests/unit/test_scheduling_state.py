"""The scheduler's state: saved and read back, under other settings, and as others see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduling_driver import Driver, letter
from tlt_pipeline import messages as m
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.decisions import decide
from tlt_pipeline.scheduling.state import StateInvalid, adopt_settings, from_bytes, to_bytes
from tlt_pipeline.scheduling.status import status_of

# --- saving -------------------------------------------------------------------------------------------------


def busy_run() -> Driver:
    run = Driver(steps=4, max_staleness=1, colocated=False, eval_every=1, eval_prompts=1)
    run.start()
    run.shard(1)
    run.weights("drafter", 1)
    run.answer(0, 0, reward=0.25)
    run.answer(0, 0, "eval", reward=0.5)
    run.answer(0, 1)
    run.idle(0)
    run.trained(0)
    run.tell(letter("s00001-p000-00"))
    return run


def test_the_state_survives_as_bytes() -> None:
    run = busy_run()
    copy = from_bytes(to_bytes(run.state))
    assert copy == run.state
    event = m.StepTrained(step=1, policy_version=2, trained=1, learner_s=1.0, **run.stamp("learner", -1))
    assert decide(copy, event, 500.0) == decide(run.state, event, 500.0)


def test_bytes_that_are_no_state_are_refused_in_one_line() -> None:
    for body in (b"", b"\x81\xa6format\x63", to_bytes(busy_run().state)[:-9]):
        with pytest.raises(StateInvalid, match="start a new run directory") as caught:
            from_bytes(body)
        assert "\n" not in str(caught.value)


def test_a_restarted_scheduler_counts_silence_from_now() -> None:
    run = Driver()
    run.start()
    run.idle(0)
    before = run.state.account.idle_s
    run.state = from_bytes(to_bytes(run.state))
    run.tell(e.Restarted(), after=1000.0)
    assert run.state.account.idle_s == before
    assert not run.look(e.Note), "nobody is lost because the scheduler was away"


def test_settings_may_grow_but_not_break_what_is_under_way() -> None:
    run = busy_run()
    more = adopt_settings(run.state, replace(run.state.settings, steps=9, slots=3))
    assert len(more.slots) == 3 and more.settings.steps == 9
    with pytest.raises(StateInvalid, match="max_staleness is 0 now: set it to 1"):
        adopt_settings(run.state, replace(run.state.settings, max_staleness=0))
    with pytest.raises(StateInvalid, match="resume with 2"):
        adopt_settings(run.state, replace(run.state.settings, slots=1))


def test_a_finished_run_goes_on_when_it_is_given_more_steps() -> None:
    run = Driver(steps=1)
    run.policy(1)
    assert run.look(e.Finish)
    run.state = adopt_settings(run.state, replace(run.state.settings, steps=2))
    run.tell(e.Restarted())
    assert run.look(e.SubmitStep) == [e.SubmitStep(1, 1, "train", 1, 2)]


# --- status -------------------------------------------------------------------------------------------------


def test_the_status_says_where_the_run_stands() -> None:
    run = Driver()
    run.start()
    run.shard(1)
    run.weights("drafter", 3)
    run.idle(0)
    run.answer(0, 0, reward=0.5, drafts=2, accepted=3)
    beat = {"running": 1, "tokens_per_s": 50.0, "policy_version": 0, "drafter_version": 3, "lease": 1}
    run.tell(m.WorkerHeartbeat(role="rollout", **beat, **run.stamp("rollout", 1)))
    status = status_of(run.state, "demo", run.now)
    assert (status.phase, status.step, status.steps) == ("rollout", 0, 2)
    assert (status.answers_done, status.answers, status.reward, status.reward_so_far) == (1, 2, None, 0.5)
    assert (status.acceptance_length, status.tokens_per_s, status.drafter_version) == (2.5, 50.0, 3)
    assert [slot.holder for slot in status.slots] == ["drafter", "rollout"] and status.eta_s is None
    run.answer(0, 1)
    assert status_of(run.state, "demo", run.now).phase == "handing over"
    assert status_of(run.state, "demo", run.now).waiting_for is None
    late = status_of(run.state, "demo", run.now + 6)
    assert late.waiting_for == "the rollout worker of slot 1 to say that it is idle"
    run.yielded(0)
    run.idle(1)
    assert status_of(run.state, "demo", run.now).phase == "learning"
    run.trained(0, after=8.0)
    later = status_of(run.state, "demo", run.now)
    assert (later.step, later.reward, later.answers_done) == (1, 0.75, 0)
    assert later.eta_s == pytest.approx(8.0)
    assert type(later).model_validate_json(later.model_dump_json()) == later
