"""What the scheduler decides about steps: admission, staleness, evaluation, dead letters."""

from __future__ import annotations

import pytest

from tests.unit.scheduling_driver import Driver, letter
from tlt_pipeline import messages as m
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.spot import spot_facts
from tlt_pipeline.scheduling.state import Account
from tlt_pipeline.scheduling.status import waiting_for

# --- the life of a step -------------------------------------------------------------------------------------


def test_a_synchronous_run_from_the_first_policy_to_the_end() -> None:
    run = Driver()
    run.start(policy=False)
    assert not run.said and waiting_for(run.state, run.now) == "the learner's first policy version (tlt learner)"
    run.policy(0)
    assert run.look(e.SubmitStep) == [e.SubmitStep(0, 0, "train", 1, 2)]
    assert [(g.slot, g.holder, g.lease) for g in run.look(e.GrantLease)] == [
        (0, "rollout", 1),
        (1, "rollout", 1),
    ]
    run.shard(1)
    run.idle(1, after=2.0)
    assert run.look(e.GrantLease) == [e.GrantLease(1, "drafter", 2)]
    assert [len(order.bodies) for order in run.look(e.AssignShards)] == [1]
    run.answer(0, 0, after=1.0)
    run.idle(0)
    run.answer(0, 1, after=1.0)
    assert run.look(e.RecallLease) == [e.RecallLease(1, 2, 1.0)] and not run.look(e.SendTrainStep)
    run.yielded(1, trained_s=1.5)
    assert run.look(e.SendTrainStep) == [e.SendTrainStep(0, 0, ("s00000-p000-00", "s00000-p000-01"), 0)]
    assert run.holders() == ["learner", "learner"]
    run.policy(1)
    run.trained(0, after=3.0)
    assert run.look(e.SubmitStep) == [e.SubmitStep(1, 1, "train", 1, 2)]
    assert run.holders() == ["rollout", "rollout"]
    for slot in (0, 1):
        run.answer(1, slot)
    for slot in (0, 1):
        run.idle(slot)
    run.trained(1)
    assert run.look(e.Finish) and run.look(e.SendShutdown) and run.state.finished
    assert run.tell(e.Tick(), after=100) == []


def test_the_record_of_a_step_adds_up() -> None:
    run = Driver(slots=1, steps=1)
    run.start()
    run.tell(m.WorkerHeartbeat(role="rollout", lease=1, **run.stamp("rollout", 0)), after=5.0)
    run.answer(0, 1, after=2.0, reward=0.0, tokens=30, drafts=4, accepted=6)
    run.answer(0, 0, after=2.0, reward=1.0, tokens=10, verified=False)
    run.idle(0, after=0.5)
    run.weights("drafter", 1)
    run.trained(0, after=3.0)
    (recorded,) = run.look(e.RecordStep)
    record = recorded.record
    assert (record.reward, record.tokens, record.unverified) == (0.5, 40, 1)
    assert (record.answer_length_p50, record.answer_length_p99, record.answer_length_max) == (10, 30, 30)
    assert record.acceptance_length == 2.5
    assert record.rollout_s == pytest.approx(4.0), "start-up of the workers is not rollout time"
    assert (record.learner_s, record.yield_wait_s) == (3.0, pytest.approx(0.5))
    assert record.step_s == pytest.approx(7.5)
    assert record.tokens_per_s == pytest.approx(10.0)
    assert (record.requests_admitted, record.requests_trained, record.drafter_versions) == (2, 2, 1)


def ready_with_a_slot_in_training() -> Driver:
    """The step's last answer is there; slot 0 is held by its drafter trainer, slot 1 by its rollout worker."""
    run = Driver(slots=2, steps=1)
    run.start()
    run.shard(1)
    run.idle(0)
    run.answer(0, 0, after=1.0)
    run.answer(0, 1)
    assert run.look(e.RecallLease)
    return run


def test_what_the_learner_waits_for_a_drafter_trainer_is_booked() -> None:
    run = ready_with_a_slot_in_training()
    run.idle(1, after=0.2)
    run.now += 0.3
    run.yielded(0, seconds=0.45, trained_s=0.9, counts={"drafter_refused_not_better": 2})
    run.trained(0, after=2.0)
    (recorded,) = run.look(e.RecordStep)
    record = recorded.record
    assert (record.yield_wait_s, record.drafter_wait_s) == (pytest.approx(0.5), pytest.approx(0.5))
    facts = spot_facts([record], Account(yields=1, yield_seconds=(0.15,)))
    assert facts["drafter_wait_share"] == pytest.approx(0.5 / record.step_s)
    assert (facts["yields"], facts["yield_s_p50"], facts["yield_s_p99"]) == (2, 0.15, 0.45)
    assert facts["drafter_versions_refused"] == {"not_better": 2}
    assert facts["slot_idle_by_slot"] == {"0": {"idle_s": 1.0, "used_s": 0.9}}


def test_waiting_for_a_rollout_worker_is_no_wait_for_the_drafter() -> None:
    run = ready_with_a_slot_in_training()
    run.yielded(0, seconds=0.0)
    run.idle(1, after=0.3)
    run.trained(0, after=2.0)
    (recorded,) = run.look(e.RecordStep)
    assert (recorded.record.yield_wait_s, recorded.record.drafter_wait_s) == (pytest.approx(0.3), 0.0)


def test_the_start_of_new_workers_after_a_resume_is_no_rollout_time() -> None:
    run = Driver(slots=1, steps=1)
    run.start()
    run.tell(m.WorkerHeartbeat(role="rollout", lease=1, **run.stamp("rollout", 0)))
    run.tell(e.Restarted(), after=100.0)
    run.started("rollout", 0)
    run.tell(m.WorkerHeartbeat(role="rollout", lease=0, **run.stamp("rollout", 0)), after=10.0)
    run.tell(m.WorkerHeartbeat(role="rollout", lease=2, **run.stamp("rollout", 0)))
    for index in (0, 1):
        run.answer(0, index, after=1.0)
    run.idle(0)
    run.trained(0)
    assert run.look(e.RecordStep)[0].record.rollout_s == pytest.approx(2.0)


def test_time_in_which_the_run_was_stopped_is_no_rollout_time() -> None:
    run = Driver(slots=1, steps=1)
    run.start()
    run.tell(m.WorkerHeartbeat(role="rollout", lease=1, **run.stamp("rollout", 0)))
    run.answer(0, 0, after=1.0)
    run.tell(e.Restarted(), after=100.0)
    run.answer(0, 1, after=1.5)
    run.idle(0)
    run.trained(0)
    record = run.look(e.RecordStep)[0].record
    assert record.rollout_s == pytest.approx(2.5)
    assert record.step_s < 10


def test_an_answer_that_arrives_twice_or_for_another_step_changes_nothing() -> None:
    run = Driver()
    run.start()
    run.answer(0, 0, reward=1.0)
    run.answer(0, 0, reward=0.0)
    for name in ("s00009-p000-00", "s00000-p007-00", "nonsense"):
        run.tell(e.CompletionSeen(name, 0, 1.0, 5))
    assert run.state.outstanding == 1
    assert run.state.account.counts == {"ignored_completion": 4, "answers_exact": 1}


def test_an_answer_of_another_policy_version_ends_the_run() -> None:
    run = Driver()
    run.start()
    run.answer(0, 0, policy_version=7)
    (failed,) = run.look(e.Fail)
    assert "policy version 7" in failed.reason and failed.code == 3


@pytest.mark.parametrize("code", [2, 3])
def test_a_failure_elsewhere_ends_the_run_with_its_code(code: int) -> None:
    run = Driver()
    run.start()
    run.tell(m.RunFailed(reason="learner: NaN in the loss", code=code, **run.stamp("learner", -1)))
    assert run.look(e.Fail) == [e.Fail("learner: NaN in the loss", code)] and run.look(e.SendShutdown)


# --- admission and staleness --------------------------------------------------------------------------------


def test_requests_are_admitted_max_staleness_steps_ahead_and_no_further() -> None:
    run = Driver(steps=5, max_staleness=2, colocated=False, slots=1)
    run.start()
    assert [(s.step, s.policy_version) for s in run.look(e.SubmitStep)] == [(0, 0), (1, 0), (2, 0)]
    for index in (0, 1):
        run.answer(1, index)
    assert not run.look(e.SendTrainStep), "steps are trained in order"
    for index in (0, 1):
        run.answer(0, index)
    assert [order.step for order in run.look(e.SendTrainStep)] == [0]
    run.trained(0)
    assert [(s.step, s.policy_version) for s in run.look(e.SubmitStep)] == [(3, 1)]
    assert [order.step for order in run.look(e.SendTrainStep)] == [1]


def test_a_learner_on_the_slots_trains_several_steps_in_a_row_when_staleness_is_allowed() -> None:
    run = Driver(steps=4, max_staleness=1, slots=1)
    run.start()
    assert [s.step for s in run.look(e.SubmitStep)] == [0, 1]
    for step, index in ((0, 0), (0, 1), (1, 0)):
        run.answer(step, index)
    assert not run.look(e.SendTrainStep), "the slot still rolls out step 1"
    run.answer(1, 1)
    run.idle(0)
    assert [order.step for order in run.look(e.SendTrainStep)] == [0]
    run.trained(0)
    assert [order.step for order in run.look(e.SendTrainStep)] == [1] and not run.look(e.SubmitStep)
    run.trained(1)
    assert [(s.step, s.policy_version) for s in run.look(e.SubmitStep)] == [(2, 2), (3, 2)]


def test_a_resumed_run_goes_on_from_the_version_that_the_learner_has() -> None:
    run = Driver(steps=5, eval_every=2, eval_prompts=1)
    run.start(policy=False)
    run.policy(3)
    assert run.look(e.SubmitStep) == [e.SubmitStep(3, 3, "train", 1, 2)]
    done = Driver(steps=3)
    done.policy(3)
    assert done.look(e.Finish)


def test_evaluations_are_greedy_extras_that_are_waited_for_and_never_trained_on() -> None:
    run = Driver(steps=2, eval_every=2, eval_prompts=2, slots=1)
    run.start()
    assert [(s.step, s.purpose, s.prompts, s.group_size) for s in run.look(e.SubmitStep)] == [
        (0, "train", 1, 2),
        (0, "eval", 2, 1),
    ]
    for index in (0, 1):
        run.answer(0, index)
    run.idle(0)
    assert not run.look(e.SendTrainStep)
    run.answer(0, 0, "eval", reward=1.0)
    run.answer(0, 1, "eval", reward=0.0)
    assert [order.request_ids for order in run.look(e.SendTrainStep)] == [("s00000-p000-00", "s00000-p000-01")]
    run.trained(0)
    assert run.look(e.RecordStep)[0].record.eval_reward == 0.5
    assert [s.purpose for s in run.look(e.SubmitStep)] == ["train"]
    for index in (0, 1):
        run.answer(1, index)
    run.idle(0)
    run.trained(1)
    assert [(s.step, s.purpose) for s in run.look(e.SubmitStep)] == [(2, "eval")], "at the end, once more"
    assert not run.look(e.Finish)
    for index in (0, 1):
        run.answer(2, index, "eval", reward=1.0)
    assert run.look(e.Finish) and run.state.evals == {2: 1.0}


def test_with_a_learner_of_its_own_an_evaluation_is_waited_for_too() -> None:
    run = Driver(colocated=False, eval_every=1, eval_prompts=1)
    run.start()
    for index in (0, 1):
        run.answer(0, index)
    assert not run.look(e.SendTrainStep)
    run.answer(0, 0, "eval")
    assert run.look(e.SendTrainStep)


# --- dead letters -------------------------------------------------------------------------------------------


def test_a_dead_request_leaves_its_step_and_the_learner_is_told() -> None:
    run = Driver(slots=1)
    run.start()
    run.tell(letter("s00000-p000-00"))
    run.tell(letter(None))
    run.answer(0, 0)
    assert run.state.outstanding == 1, "a completion after the dead letter doesn't count"
    run.answer(0, 1)
    run.idle(0)
    assert run.look(e.SendTrainStep) == [e.SendTrainStep(0, 0, ("s00000-p000-01",), 1)]
    assert run.state.account.dead_letters == 2


def test_a_completion_that_the_learner_could_not_take_leaves_its_step() -> None:
    run = Driver(slots=1)
    run.start()
    run.answer(0, 0)
    run.tell(letter("s00000-p000-00", m.COMPLETIONS))
    run.answer(0, 1)
    run.idle(0)
    assert run.look(e.SendTrainStep)[0].dead == 1


def test_a_step_without_any_answer_ends_the_run_with_the_reason() -> None:
    run = Driver(slots=1)
    run.start()
    for index in (0, 1):
        run.tell(letter(f"s00000-p000-{index:02d}"))
    (failed,) = run.look(e.Fail)
    assert "every request of step 0 was given up" in failed.reason
