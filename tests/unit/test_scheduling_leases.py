"""What the scheduler decides about slots and shards."""

from __future__ import annotations

from tests.unit.scheduling_driver import Driver
from tlt_pipeline import messages as m
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.shards import forget_missing
from tlt_pipeline.scheduling.spot import spot_facts

# --- leases -------------------------------------------------------------------------------------------------


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


def assigned(run: Driver) -> list[tuple[int, list[str]]]:
    return [(o.slot, [m.decode(body).shard_id for body in o.bodies]) for o in run.look(e.AssignShards)]  # type: ignore[union-attr]


def test_slots_that_train_together_share_out_the_shards_and_all_get_the_held_out_ones() -> None:
    run = Driver(slots=3)
    run.start()
    for number in range(1, 7):
        run.shard(number, held_out=number == 3)
    run.idle(0)
    assert assigned(run) == [(0, ["h1", "h2", "h3", "h4", "h5", "h6"])], "alone it gets everything"
    run.idle(1)
    assert assigned(run) == [(1, ["h1", "h3", "h5"])]
    run.shard(7)
    run.shard(8)
    assert assigned(run) == [(1, ["h7"]), (0, ["h8"])]
    run.yielded(0, reason="error: out of memory")
    assert run.holders() == [None, "drafter", "rollout"]
    assert assigned(run) == [(1, [f"h{number}" for number in range(1, 9)])], "what the other one had is left to it"


def test_few_shards_are_not_shared_out() -> None:
    run = Driver(slots=3)
    run.start()
    for number in range(1, 4):
        run.shard(number)
    run.idle(0)
    run.idle(1)
    assert assigned(run) == [(0, ["h1", "h2", "h3"]), (1, ["h1", "h2", "h3"])]


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


def test_a_trainer_whose_training_does_not_pay_rests_until_the_next_requests() -> None:
    run = Driver(steps=2)
    run.start()
    run.shard(1)
    run.idle(0)
    run.yielded(0, reason="budget_no_gain", seconds=0.0)
    assert not run.look(e.Note), "nothing is wrong"
    run.shard(2)
    run.tell(e.Tick(), after=3.0)
    assert run.holders()[0] is None
    assert run.state.account.unused_s == {"trainer_yielded_budget_no_gain": 3.0}
    facts = spot_facts([], run.state.account)
    assert facts["slot_idle_s"] == 3.0 and facts["yield_s_p99"] == 0.0, "nobody asked for the slot"
    run.answer(0, 0)
    run.answer(0, 1)
    run.idle(1)
    run.trained(0)
    run.idle(0)
    assert run.holders()[0] == "drafter", "asked again with the next step"


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


# --- shards -------------------------------------------------------------------------------------------------


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


def test_above_the_quota_recent_versions_and_worthier_shards_stay() -> None:
    run = Driver(keep_steps=3, bytes_quota=45)
    run.start()
    for number, step, worth in ((1, 1, 5.0), (2, 1, 9.0), (3, 1, 1.0), (4, 0, 99.0)):
        run.shard(number, step=step, worth=worth)
    assert not run.look(e.DropShards)
    run.shard(5, step=2)
    assert run.look(e.DropShards) == [e.DropShards(("b4",), "over_bytes_quota")]
    run.shard(6, step=2, size=20)
    assert run.look(e.DropShards) == [e.DropShards(("b1", "b3"), "over_bytes_quota")]
    assert [shard.shard_id for shard in run.state.shards] == ["h2", "h5", "h6"]


def test_shards_whose_blobs_are_gone_after_a_restart_are_forgotten() -> None:
    run = Driver()
    run.start()
    for number in (1, 2, 3):
        run.shard(number)
    state = forget_missing(run.state, {"b2"})
    assert [shard.shard_id for shard in state.shards] == ["h2"]
    assert state.account.counts == {"shards_dropped_missing": 2}
