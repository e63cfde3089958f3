"""The scheduler's decisions, one behaviour at a time, with time given by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tlt_pipeline import messages as m
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.decisions import decide
from tlt_pipeline.scheduling.ids import RequestId
from tlt_pipeline.scheduling.state import (
    Settings,
    StateInvalid,
    adopt_settings,
    from_bytes,
    initial_state,
    to_bytes,
)
from tlt_pipeline.scheduling.status import status_of, waiting_for


class Driver:
    """A run whose events are told one by one; `said` holds the commands since the last look."""

    def __init__(self, **changes: Any) -> None:
        chosen: dict[str, Any] = {"steps": 2, "prompts": 1, "group_size": 2, "slots": 2, **changes}
        self.now = 100.0
        self.state = initial_state(Settings(**chosen), self.now)
        self.said: list[e.Command] = []

    def tell(self, event: e.Event, after: float = 0.0) -> list[e.Command]:
        self.now += after
        self.state, commands = decide(self.state, event, self.now)
        self.said += commands
        return commands

    def look(self, kind: type) -> list[Any]:
        """Commands of this kind since the last look at it."""
        found = [command for command in self.said if isinstance(command, kind)]
        self.said = [command for command in self.said if not isinstance(command, kind)]
        return found

    def stamp(self, role: str, slot: int) -> dict[str, Any]:
        return {"slot": slot, "worker": f"{role}-{slot}", "at": self.now}

    def start(self, *, trainers: bool = True, policy: bool = True) -> None:
        for slot in range(len(self.state.slots)):
            self.started("rollout", slot)
            if trainers:
                self.started("drafter-trainer", slot)
        if policy:
            self.policy(0)

    def started(self, role: Any, slot: int) -> list[e.Command]:
        return self.tell(m.WorkerStarted(role=role, **self.stamp(role, slot)))

    def beat(self, *, without: tuple[str, ...] = (), after: float = 0.0) -> None:
        """All workers but those named are alive."""
        self.now += after
        for slot in range(len(self.state.slots)):
            for role in ("rollout", "drafter-trainer"):
                if f"{role}-{slot}" not in without:
                    self.tell(m.WorkerHeartbeat(role=role, **self.stamp(role, slot)))

    def weights(self, model: Any, version: int) -> list[e.Command]:
        facts = {"parent": 0, "policy_version": 0, "step": 0, "path": "", "size": 0, "sha256": ""}
        return self.tell(m.WeightsPublished(model=model, version=version, **facts))

    def policy(self, version: int) -> list[e.Command]:
        return self.weights("policy", version)

    def idle(self, slot: int, after: float = 0.0) -> list[e.Command]:
        lease = self.state.slots[slot].lease
        self.now += after
        return self.tell(m.WorkerIdle(lease=lease, **self.stamp("rollout", slot)))

    def yielded(self, slot: int, lease: int | None = None, **facts: Any) -> list[e.Command]:
        told = {"seconds": 0.1, "trained_s": 0.0, "tokens_trained": 0, "reason": "recalled", **facts}
        lease = self.state.slots[slot].lease if lease is None else lease
        return self.tell(m.WorkerYielded(lease=lease, **told, **self.stamp("drafter-trainer", slot)))

    def answer(self, step: int, index: int, purpose: Any = "train", after: float = 0.0, **facts: Any) -> None:
        version = next(b.policy_version for b in self.state.batches if (b.step, b.purpose) == (step, purpose))
        prompt, index = divmod(index, self.state.settings.group_size if purpose == "train" else 1)
        told = {"reward": 1.0, "tokens": 10, "policy_version": version, **facts}
        self.tell(e.CompletionSeen(str(RequestId(purpose, step, prompt, index)), **told), after)

    def trained(self, step: int, after: float = 1.0) -> list[e.Command]:
        self.now += after
        facts = {"trained": 2, "learner_s": after, "policy_version": step + 1}
        return self.tell(m.StepTrained(step=step, **facts, **self.stamp("learner", -1)))

    def shard(self, number: int, *, step: int = 0, size: int = 10, held_out: bool = False) -> list[e.Command]:
        blob = m.BlobRef(name=f"b{number}", size=size, sha256="")
        facts: dict[str, Any] = {"slot": 0, "policy_version": 0, "documents": 1, "tokens": 5}
        shard = m.HiddenShard(shard_id=f"h{number}", blob=blob, step=step, held_out=held_out, **facts)
        return self.tell(shard)

    def holders(self) -> list[str | None]:
        return [slot.holder for slot in self.state.slots]


# --- the life of a step ------------------------------------------------------------------------------------------


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


# --- admission and staleness -------------------------------------------------------------------------------------


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


# --- dead letters ------------------------------------------------------------------------------------------------


def letter(name: str | None, stream: str = m.REQUESTS) -> m.DeadLetter:
    facts = {"entry_id": "1-1", "attempts": 3, "body": b""}
    return m.DeadLetter(stream=stream, reason="too many attempts", request_id=name, **facts)


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


# --- leases ------------------------------------------------------------------------------------------------------


def test_a_worker_that_looked_before_the_requests_came_is_sent_again() -> None:
    run = Driver(steps=3, max_staleness=1, colocated=False, slots=1)
    run.start()
    run.look(e.GrantLease)
    run.policy(1)  # admits step 2 while the worker is on its way to say that it finds nothing
    run.idle(0)
    assert run.look(e.GrantLease) == [e.GrantLease(0, "rollout", 2)]


def test_a_slot_is_not_leased_to_the_drafter_without_need_of_training() -> None:
    for changes, shards, trainers, reason in (
        ({"train_drafter": False}, 1, True, "drafter_training_off"),
        ({}, 0, True, "no_shards"),
        ({}, 1, False, "no_trainer"),
    ):
        run = Driver(**changes)
        run.start(trainers=trainers)
        for number in range(shards):
            run.shard(number)
        run.look(e.GrantLease)
        run.idle(0)
        run.tell(e.Tick(), after=2.0)
        assert run.look(e.GrantLease) == [] and run.holders() == [None, "rollout"]
        assert run.state.account.unused_s == {reason: 2.0} and run.state.account.idle_s == 2.0


def test_shards_that_arrive_while_a_slot_trains_are_sent_to_it() -> None:
    run = Driver()
    run.start()
    run.idle(0)
    run.shard(1, held_out=True)
    assert run.holders()[0] is None, "held-out data alone is nothing to train on"
    run.shard(2)
    run.shard(3)
    orders = [
        (o.lease, [m.decode(body).shard_id for body in o.bodies])  # type: ignore[union-attr]
        for o in run.look(e.AssignShards)
    ]
    assert orders == [(2, ["h1", "h2"]), (2, ["h3"])]


def test_a_late_yield_is_counted_and_waited_for_no_longer_but_its_work_counts() -> None:
    run = Driver()
    run.start()
    run.shard(1)
    run.idle(0)
    run.answer(0, 0, after=4.0)
    run.answer(0, 1)
    run.idle(1)
    assert run.look(e.RecallLease)
    run.tell(e.Tick(), after=0.9)
    assert not run.look(e.SendTrainStep)
    run.tell(e.Tick(), after=0.2)
    assert run.look(e.SendTrainStep) and run.look(e.Note)
    assert run.state.account.counts["late_yields"] == 1 and run.state.account.used_s == 0.0
    run.yielded(0, lease=2, trained_s=100.0)
    assert run.state.account.used_s == run.state.account.idle_s == 4.0
    run.yielded(0, lease=2, trained_s=100.0)
    assert run.state.account.used_s == 4.0


def test_a_trainer_that_gives_up_is_not_asked_again_before_something_changed() -> None:
    run = Driver()
    run.start()
    run.shard(1)
    run.idle(0)
    run.yielded(0, reason="no_data")
    run.tell(e.Tick(), after=1.0)
    assert run.holders()[0] is None
    assert run.state.account.unused_s == {"trainer_yielded_no_data": 1.0}
    run.shard(2)
    assert run.holders()[0] == "drafter"
    run.yielded(0, reason="error: out of memory")
    run.shard(3)
    assert run.holders()[0] is None
    assert run.state.account.counts == {"trainer_yielded_no_data": 1, "trainer_yielded_error": 1}


def test_with_a_learner_of_its_own_training_goes_on_until_the_next_admission() -> None:
    run = Driver(colocated=False, slots=1)
    run.start()
    run.shard(1)
    for index in (0, 1):
        run.answer(0, index)
    assert run.look(e.SendTrainStep)
    run.idle(0)
    assert run.holders() == ["drafter"]
    run.policy(1)
    assert run.look(e.RecallLease) and run.look(e.SubmitStep)
    run.yielded(0)
    assert run.holders() == ["rollout"]


def test_a_restarted_rollout_worker_gets_a_lease_again_and_a_restarted_trainer_its_shards() -> None:
    run = Driver()
    run.start()
    run.shard(1)
    run.idle(0)
    run.said.clear()
    run.started("rollout", 1)
    assert run.look(e.GrantLease) == [e.GrantLease(1, "rollout", 2)]
    run.started("drafter-trainer", 0)
    assert run.look(e.GrantLease) == [e.GrantLease(0, "drafter", 3)]
    assert [(o.slot, o.lease) for o in run.look(e.AssignShards)] == [(0, 3)]
    run.tell(m.WorkerIdle(lease=1, **run.stamp("rollout", 1)))
    assert run.holders() == ["drafter", "rollout"], "what its earlier life said is old"


def test_a_lost_worker_sends_the_others_to_look_for_its_requests() -> None:
    run = Driver(worker_timeout_s=5.0)
    run.start()
    run.shard(1)
    run.idle(0)
    assert run.holders() == ["drafter", "rollout"]
    run.said.clear()
    run.beat(without=("rollout-1",), after=4.0)
    assert not run.said
    run.beat(without=("rollout-1",), after=1.5)
    assert [r.slot for r in run.look(e.RecallLease)] == [0]
    run.yielded(0)
    assert run.look(e.GrantLease) == [e.GrantLease(0, "rollout", 3)]
    run.idle(0)
    run.beat(without=("rollout-1",), after=0.5)
    assert not run.look(e.GrantLease), "rests before it looks again"
    run.beat(without=("rollout-1",), after=0.6)
    assert run.look(e.GrantLease) == [e.GrantLease(0, "rollout", 4)]
    for index in (0, 1):
        run.answer(0, index)
    run.idle(0)
    assert run.look(e.SendTrainStep), "the lost worker's device counts as free"


def test_a_lost_worker_is_made_up_for_while_another_still_writes() -> None:
    run = Driver(slots=3, worker_timeout_s=5.0)
    run.start()
    run.shard(1)
    run.idle(0)
    run.beat(without=("rollout-2",), after=4.0)
    run.beat(without=("rollout-2",), after=1.5)
    assert [r.slot for r in run.look(e.RecallLease)] == [0]
    run.yielded(0)
    assert run.holders() == ["rollout", "rollout", "rollout"]
    run.look(e.GrantLease)
    run.beat(after=0.1)
    assert [note.text for note in run.look(e.Note)] == ["worker is silent", "worker is back"]
    run.idle(0)
    assert run.holders() == ["drafter", "rollout", "rollout"]


def test_a_silent_trainer_loses_the_slot() -> None:
    run = Driver(worker_timeout_s=5.0)
    run.start()
    run.shard(1)
    run.idle(0)
    for _ in range(2):
        run.beat(without=("drafter-trainer-0",), after=4.0)
    assert run.holders() == [None, "rollout"]
    assert run.state.account.counts == {"worker_lost_drafter-trainer": 1}
    run.beat(after=1.0)
    assert run.holders() == ["drafter", "rollout"]
    assert run.state.account.unused_s == {"no_trainer": 1.0}


def test_what_carries_an_old_lease_is_ignored() -> None:
    run = Driver()
    run.start()
    run.shard(1)
    run.idle(0)
    for _ in range(2):
        run.started("drafter-trainer", 0)
    run.tell(e.Tick(), after=5.0)
    run.yielded(0, lease=2, trained_s=5.0)
    run.tell(m.WorkerIdle(lease=0, **run.stamp("rollout", 1)))
    run.tell(m.WorkerIdle(lease=1, **run.stamp("rollout", 7)))
    assert run.holders() == ["drafter", "rollout"] and run.state.account.used_s == 0.0
    assert run.state.account.counts == {
        "trainer_restarted": 2,
        "ignored_old_lease": 2,
        "ignored_unknown_worker": 1,
    }


def test_requests_that_nobody_works_on_are_looked_for() -> None:
    run = Driver(slots=1)
    run.start()
    run.shard(1)
    run.idle(0)
    assert run.holders() == [None], "the last answers may still be on their way"
    run.tell(e.Tick(), after=1.1)
    assert run.holders() == ["rollout"]


# --- shards ------------------------------------------------------------------------------------------------------


def test_the_shard_buffer_keeps_to_its_steps_and_its_quota() -> None:
    run = Driver(keep_steps=2, bytes_quota=45)
    run.start()
    run.shard(1, step=0, held_out=True)
    run.shard(2, step=0)
    run.shard(3, step=1)
    assert not run.look(e.DropShards)
    run.shard(4, step=2)
    assert run.look(e.DropShards) == [e.DropShards(("b2",), "too_old")], "the only held-out shard stays"
    run.shard(5, step=2, held_out=True)
    assert run.look(e.DropShards) == [e.DropShards(("b1",), "too_old")]
    run.shard(6, step=2, size=30)
    assert run.look(e.DropShards) == [e.DropShards(("b3", "b4"), "over_bytes_quota")]
    run.shard(6, step=2, size=30)
    assert sum(shard.size for shard in run.state.shards) == 40
    assert run.state.account.counts == {
        "shards_dropped_too_old": 2,
        "shards_dropped_over_bytes_quota": 2,
        "shard_duplicate": 1,
    }


# --- saving ------------------------------------------------------------------------------------------------------


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


# --- status ------------------------------------------------------------------------------------------------------


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
