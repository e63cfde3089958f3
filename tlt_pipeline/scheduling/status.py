"""The small public picture of a run that `tlt status` and the progress display show.

The service keeps it as JSON under the bus's state key `STATUS_KEY`:
`RunStatus.model_validate_json(await bus.load_state(STATUS_KEY))`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tlt_pipeline.messages import Holder
from tlt_pipeline.scheduling.records import acceptance_length, mean
from tlt_pipeline.scheduling.state import Batch, Presence, Slot, State
from tlt_pipeline.scheduling.waiting import evaluating, is_busy, is_ending, is_learners_turn, live_steps

STATUS_KEY = "status"
PATIENCE_S = 5.0
"""Slots that the learner needs are given back in less; after so long it is worth a word."""

Phase = Literal["starting", "rollout", "evaluating", "handing over", "learning", "ending", "finished", "failed"]


class SlotStatus(BaseModel):
    """`holder` None: nobody's. `rollout` and `trainer`: the state of the slot's two processes."""

    model_config = ConfigDict(frozen=True)

    slot: int
    holder: Holder | None
    lease: int
    rollout: Literal["absent", "up", "lost"]
    trainer: Literal["absent", "up", "lost"]
    running: int
    tokens_per_s: float
    policy_version: int
    drafter_version: int


class RunStatus(BaseModel):
    """`step` counts finished steps; `answers_done` of `answers` belong to the step under way. `reward` is
    the mean of the last finished step, None before; `eta_s` None until one step is done."""

    model_config = ConfigDict(frozen=True)

    run: str
    at: float
    phase: Phase
    reason: str | None
    waiting_for: str | None
    step: int
    steps: int
    answers_done: int
    answers: int
    reward: float | None
    reward_so_far: float | None
    """Of the step under way."""
    policy_version: int
    drafter_version: int
    acceptance_length: float
    tokens_per_s: float
    eta_s: float | None
    dead_letters: int
    slots: tuple[SlotStatus, ...]


def status_of(state: State, run: str, now: float) -> RunStatus:
    batch = next((b for b in live_steps(state) if b.step == state.trained), None)
    answers = list(batch.answers.values()) if batch else []
    recent = state.recent
    left = max(0, state.settings.steps - state.trained)
    return RunStatus(
        run=run,
        at=now,
        phase=_phase(state),
        reason=state.failed,
        waiting_for=waiting_for(state, now),
        step=state.trained,
        steps=state.settings.steps,
        answers_done=batch.size - batch.outstanding if batch else 0,
        answers=batch.size if batch else state.settings.prompts * state.settings.group_size,
        reward=recent[-1].reward if recent else None,
        reward_so_far=mean(answer.reward for answer in answers) if answers else None,
        policy_version=state.policy_version,
        drafter_version=state.drafter_version,
        acceptance_length=_acceptance(state, batch),
        tokens_per_s=sum(slot.rollout.tokens_per_s for slot in state.slots if slot.rollout.up),
        eta_s=left * mean(done.step_s for done in recent) if recent else None,
        dead_letters=state.account.dead_letters,
        slots=tuple(_slot_status(number, slot) for number, slot in enumerate(state.slots)),
    )


def waiting_for(state: State, now: float) -> str | None:
    """Who keeps the run from going on, in words for the log; None: nobody in particular."""
    if state.next_step is None:
        return "the learner's first policy version (tlt learner)"
    if state.outstanding and not any(slot.rollout.up for slot in state.slots):
        return f"a rollout worker (tlt rollout --slot 0 to {len(state.slots) - 1})"
    if state.training is not None and not state.learner.started:
        return "the learner (tlt learner)"
    if state.ready_at is not None and now - state.ready_at > PATIENCE_S:
        held = [str(number) for number, slot in enumerate(state.slots) if is_busy(slot)]
        return f"the rollout worker of slot {', '.join(held)} to say that it is idle" if held else None
    return None


def _phase(state: State) -> Phase:
    if state.failed is not None:
        return "failed"
    if state.finished:
        return "finished"
    if state.next_step is None:
        return "starting"
    if is_ending(state):
        return "ending"
    if state.training is not None:
        return "learning"
    if is_learners_turn(state):
        return "handing over"
    rolling_out = any(batch.outstanding for batch in live_steps(state))
    return "evaluating" if evaluating(state) and not rolling_out else "rollout"


def _acceptance(state: State, batch: Batch | None) -> float:
    """Of the step under way as far as it is answered; before its first answer what workers report, or the
    last step's."""
    if batch and any(answer.drafts for answer in batch.answers.values()):
        return acceptance_length(batch.answers.values())
    reported = [s.rollout.acceptance_length for s in state.slots if s.rollout.up and s.rollout.acceptance_length]
    if reported:
        return mean(reported)
    return state.recent[-1].acceptance_length if state.recent else 1.0


def _slot_status(number: int, slot: Slot) -> SlotStatus:
    return SlotStatus(
        slot=number,
        holder=slot.holder,
        lease=slot.lease,
        rollout=_presence(slot.rollout),
        trainer=_presence(slot.trainer),
        running=slot.rollout.running,
        tokens_per_s=slot.rollout.tokens_per_s,
        policy_version=slot.rollout.policy_version,
        drafter_version=slot.rollout.drafter_version,
    )


def _presence(known: Presence) -> Literal["absent", "up", "lost"]:
    if not known.started:
        return "absent"
    return "lost" if known.lost else "up"
