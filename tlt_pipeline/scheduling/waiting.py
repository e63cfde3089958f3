"""Questions about a state: who waits for whom, and what a slot is needed for. No decision is taken here."""

from __future__ import annotations

from tlt_pipeline.scheduling.state import Batch, Slot, State

NO_DATA = "no_data"
"""Reason of a trainer that had nothing to train on; it is asked again when a shard arrives."""
BUDGET = "budget_"
"""Beginning of the reasons of a trainer that found that training doesn't pay; it is asked again with the next requests
that are admitted."""


def is_over(state: State) -> bool:
    return state.finished or state.failed is not None


def is_busy(slot: Slot) -> bool:
    """Its rollout worker is alive and has, or looks for, requests."""
    return slot.holder == "rollout" and slot.rollout.up


def live_steps(state: State) -> list[Batch]:
    """Training batches that aren't trained yet, in order."""
    return [batch for batch in state.batches if batch.purpose == "train"]


def evaluating(state: State) -> bool:
    return any(batch.purpose == "eval" for batch in state.batches)


def ready_batch(state: State) -> Batch | None:
    """The step that the learner could train now, as far as answers go.

    An evaluation is waited for, so that its policy version is still kept. Where the learner uses the
    slots' devices, so is every request: a rollout worker can't be recalled."""
    if state.training is not None or evaluating(state):
        return None
    if state.settings.colocated and state.outstanding:
        return None
    return next((b for b in live_steps(state) if b.step == state.trained and b.outstanding == 0), None)


def is_learners_turn(state: State) -> bool:
    """The slots' devices belong to the learner now, or will as soon as they are given back."""
    return state.settings.colocated and (state.training is not None or ready_batch(state) is not None)


def is_idle_time(state: State) -> bool:
    """A slot without rollout work is idle now, as slot_idle_s counts it: a rollout is unfinished, or the
    learner works on a device of its own."""
    return state.outstanding > 0 or (state.training is not None and not state.settings.colocated)


def is_eval_due(state: State) -> bool:
    """Versions that are multiples of eval_every, and the last one; each once."""
    settings, version = state.settings, state.policy_version
    if not settings.eval_every or not settings.eval_prompts or state.next_step is None:
        return False
    if version <= state.last_eval:
        return False
    return version >= settings.steps or version // settings.eval_every > state.last_eval // settings.eval_every


def is_ending(state: State) -> bool:
    """Nothing is left to roll out, evaluate or train."""
    known = state.next_step is not None and state.trained >= state.settings.steps
    return known and not state.batches and not is_eval_due(state)


def is_orphaned(state: State, now: float) -> bool:
    """Requests may lie with a worker that is gone, so that others must look for them: a slot's worker is
    lost, or all say that they find none. (Completions may still be on their way: hence the rest.)"""
    if not state.outstanding:
        return False
    if any(slot.holder == "rollout" and slot.rollout.lost for slot in state.slots):
        return True
    if any(is_busy(slot) for slot in state.slots):
        return False
    return now >= max(slot.looked_at for slot in state.slots) + state.settings.retry_s


def has_rollout_work(state: State, slot: Slot, now: float) -> bool:
    """Its rollout worker should look for requests: some were admitted since it last did, or some are
    orphaned."""
    if not state.outstanding or not slot.rollout.up:
        return False
    return slot.admissions != state.admissions or is_orphaned(state, now)


def why_unused(state: State, slot: Slot, now: float) -> str | None:
    """Why no drafter trains on this idle slot; None: one can."""
    if not state.settings.train_drafter:
        return "drafter_training_off"
    if not slot.trainer.up:
        return "no_trainer"
    if is_orphaned(state, now):
        return "requests_orphaned"
    if state.outstanding and not any(is_busy(other) for other in state.slots):
        return "last_completions"
    if not any(not shard.held_out for shard in state.shards):
        return "no_shards"
    if slot.barred and slot.barred_at == (state.shards_seen if slot.barred == NO_DATA else state.admissions):
        return f"trainer_yielded_{slot.barred}"
    return None
