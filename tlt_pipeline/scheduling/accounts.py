"""Where the slots' time went, and what was skipped: the books behind summary.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tlt_pipeline.messages import StepTrained, WorkerYielded
from tlt_pipeline.scheduling.records import StepRecord, account_facts, answer_facts
from tlt_pipeline.scheduling.state import Account, Batch, Recent, Slot, State, Training
from tlt_pipeline.scheduling.waiting import is_idle_time, why_unused

RECENT_STEPS = 5


def count(state: State, reason: str, amount: int = 1) -> State:
    counts = {**state.account.counts, reason: state.account.counts.get(reason, 0) + amount}
    return replace(state, account=replace(state.account, counts=counts))


def accrue(state: State, now: float) -> State:
    """Books the time since the last event under the state that held until now. A clock that went back
    counts as none."""
    passed = max(0.0, now - state.accrued_at)
    state = _accrue_wait(replace(state, accrued_at=now), passed)
    if passed == 0.0 or not is_idle_time(state):
        return state
    unused, by_slot = dict(state.account.unused_s), dict(state.account.idle_by_slot)
    idle_s, slots = state.account.idle_s, list(state.slots)
    for number, slot in enumerate(slots):
        if slot.holder == "drafter":
            slots[number] = replace(slot, lease_idle_s=slot.lease_idle_s + passed)
        elif slot.holder is None and slot.rollout.up:
            reason = why_unused(state, slot, now) or "handing_over"
            unused[reason] = unused.get(reason, 0.0) + passed
        else:
            continue
        idle_s += passed
        by_slot[number] = by_slot.get(number, 0.0) + passed
    account = replace(state.account, idle_s=idle_s, idle_by_slot=by_slot, unused_s=unused)
    return replace(state, slots=tuple(slots), account=account)


def _accrue_wait(state: State, passed: float) -> State:
    """A step is ready for the learner and a drafter trainer still holds a slot."""
    if state.ready_at is None or not any(slot.holder == "drafter" for slot in state.slots):
        return state
    return replace(state, account=replace(state.account, drafter_wait_s=state.account.drafter_wait_s + passed))


def book_yield(state: State, event: WorkerYielded, idle_s: float, *, asked: bool) -> State:
    """A drafter lease with `idle_s` of idle time has ended; of that, the time really trained counts as
    used. `asked`: it was recalled, so what it took to give the slot back is looked at."""
    for reason, amount in event.counts.items():
        state = count(state, reason, amount)
    account = state.account
    used_s = min(max(event.trained_s, 0.0), idle_s)
    took = (round(max(event.seconds, 0.0), 4),) if asked else ()
    account = replace(
        account,
        used_s=account.used_s + used_s,
        used_by_slot={**account.used_by_slot, event.slot: account.used_by_slot.get(event.slot, 0.0) + used_s},
        drafter_tokens=account.drafter_tokens + event.tokens_trained,
        yields=account.yields + 1,
        yield_seconds=account.yield_seconds + took,
    )
    return replace(state, account=account)


def end_late(slot: Slot) -> Slot:
    """The drafter lease is over without an answer; what it trained may still be reported."""
    return replace(
        slot,
        holder=None,
        recalled_at=None,
        late_lease=slot.lease,
        late_idle_s=slot.lease_idle_s,
        lease_idle_s=0.0,
    )


def close_step(state: State, batch: Batch, event: StepTrained, now: float) -> tuple[State, StepRecord]:
    """The record of a trained step; a new account begins."""
    assert state.training is not None and batch.finished_at is not None
    record = StepRecord(
        **answer_facts(list(batch.answers.values())),
        **account_facts(state.account),
        **_times(state, batch, state.training, event, now),
        step=batch.step,
        policy_version=event.policy_version,
        rollout_version=batch.policy_version,
        eval_reward=state.evals.get(batch.step),
        requests_admitted=batch.size,
        requests_trained=event.trained,
        requests_dead=len(batch.dead),
        drafter_version=state.drafter_version,
        learner=event.metrics,
    )
    recent = Recent(record.reward, record.acceptance_length, record.step_s, record.tokens_per_s)
    evals = {version: score for version, score in state.evals.items() if version > batch.step}
    state = replace(
        state, account=Account(), recent=(*state.recent, recent)[-RECENT_STEPS:], evals=evals, trained_at=now
    )
    return state, record


def _times(state: State, batch: Batch, training: Training, event: StepTrained, now: float) -> dict[str, Any]:
    assert batch.finished_at is not None
    began_at = max(batch.admitted_at, state.began_at or 0.0)
    rollout_s = max(0.0, batch.finished_at - began_at)
    tokens = sum(answer.tokens for answer in batch.answers.values())
    return {
        "rollout_s": rollout_s,
        "tokens_per_s": tokens / rollout_s if rollout_s else 0.0,
        "yield_wait_s": training.waited_s,
        "learner_s": event.learner_s,
        "step_s": max(0.0, now - max(began_at, state.trained_at or 0.0)),
    }
