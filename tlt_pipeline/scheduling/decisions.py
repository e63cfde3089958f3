"""The scheduler's core. `decide` is pure: the same state, event and time give the same result, anywhere.

Every event is handled in the same way: book the time that passed, note what the event says, then do
whatever the state now allows. What follows is read off the state, not off the event, so a late, doubled or
reordered event changes when something is done and never whether.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tlt_pipeline.messages import (
    DeadLetter,
    HiddenShard,
    RunFailed,
    StepTrained,
    WeightsPublished,
    WorkerHeartbeat,
    WorkerIdle,
    WorkerStarted,
    WorkerYielded,
)
from tlt_pipeline.scheduling.accounts import accrue
from tlt_pipeline.scheduling.admission import (
    admit,
    begin_training,
    fail,
    note_completion,
    note_dead,
    note_trained,
    note_weights,
)
from tlt_pipeline.scheduling.events import (
    Command,
    CompletionSeen,
    Event,
    Finish,
    Restarted,
    SendShutdown,
    Tick,
)
from tlt_pipeline.scheduling.leases import (
    Decision,
    expire_recalls,
    grant_leases,
    note_idle,
    note_losses,
    note_worker,
    note_yield,
    recall_leases,
)
from tlt_pipeline.scheduling.rollback import roll_back
from tlt_pipeline.scheduling.shards import assign_shards, evict_shards, take_shard
from tlt_pipeline.scheduling.state import Presence, State
from tlt_pipeline.scheduling.waiting import is_ending, is_over

_FOLLOWS: tuple[Callable[[State, float], Decision], ...] = (
    expire_recalls,
    note_losses,
    admit,
    recall_leases,
    begin_training,
    grant_leases,
    lambda state, _: evict_shards(state),
    lambda state, _: assign_shards(state),
    lambda state, _: roll_back(state),
    lambda state, _: finish(state),
)


def decide(state: State, event: Event, now: float) -> tuple[State, list[Command]]:
    """The state after `event` at `now` (seconds, any epoch), and what must be done. A run that is over
    stays so."""
    if isinstance(event, Restarted):
        state = _wake(state, now)
    if is_over(state):
        return state, []
    state = accrue(state, now)
    state, commands = _note(state, event, now)
    for follow in _FOLLOWS:
        if is_over(state):
            break
        state, more = follow(state, now)
        commands = [*commands, *more]
    return state, commands


def _note(state: State, event: Event, now: float) -> Decision:
    match event:
        case Tick() | Restarted():
            return state, []
        case CompletionSeen():
            return note_completion(state, event, now)
        case WorkerStarted() | WorkerHeartbeat():
            return note_worker(state, event, now)
        case WorkerIdle():
            return note_idle(state, event, now), []
        case WorkerYielded():
            return note_yield(state, event)
        case HiddenShard():
            return take_shard(state, event), []
        case WeightsPublished():
            return note_weights(state, event), []
        case StepTrained():
            return note_trained(state, event, now)
        case DeadLetter():
            return note_dead(state, event.request_id, event.stream, event.reason, now)
        case RunFailed():
            # A scheduler of an earlier life has said so to others; whoever started the run again knows.
            return (state, []) if event.worker == "scheduler" else fail(state, event.reason, event.code)


def finish(state: State) -> Decision:
    """All is done and every slot is given back, so that what trainers did is on the books."""
    if not is_ending(state) or any(slot.holder == "drafter" for slot in state.slots):
        return state, []
    return replace(state, finished=True), [SendShutdown("the run is complete"), Finish()]


def _wake(state: State, now: float) -> State:
    """Silence and waiting are counted from now, and steps under way as if no time had passed; a failure is forgotten,
    whoever starts the run again has seen it; a run that has more steps by now goes on."""
    stopped_s = max(0.0, now - state.accrued_at)

    def seen(known: Presence) -> Presence:
        return replace(known, seen_at=now)

    slots = (
        replace(
            slot,
            rollout=seen(slot.rollout),
            trainer=seen(slot.trainer),
            looked_at=now,
            recalled_at=None if slot.recalled_at is None else now,
        )
        for slot in state.slots
    )
    batches = (
        batch if batch.finished_at is not None else replace(batch, admitted_at=batch.admitted_at + stopped_s)
        for batch in state.batches
    )
    return replace(
        state,
        slots=tuple(slots),
        batches=tuple(batches),
        began_at=None if state.began_at is None else state.began_at + stopped_s,
        trained_at=None if state.trained_at is None else state.trained_at + stopped_s,
        accrued_at=now,
        failed=None,
        finished=state.finished and is_ending(state),
    )
