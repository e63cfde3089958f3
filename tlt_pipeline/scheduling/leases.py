"""Who holds which slot. A lease has a number that only grows; what carries an older one is ignored."""

from __future__ import annotations

from dataclasses import replace

from tlt_pipeline.messages import Holder, WorkerHeartbeat, WorkerIdle, WorkerStarted, WorkerYielded
from tlt_pipeline.scheduling.accounts import book_yield, count, end_late
from tlt_pipeline.scheduling.events import Command, GrantLease, Note, RecallLease
from tlt_pipeline.scheduling.state import Presence, Slot, State
from tlt_pipeline.scheduling.waiting import (
    BUDGET,
    NO_DATA,
    has_rollout_work,
    is_ending,
    is_idle_time,
    is_learners_turn,
    is_orphaned,
    why_unused,
)

Decision = tuple[State, list[Command]]


def put_slot(state: State, number: int, slot: Slot) -> State:
    return replace(state, slots=(*state.slots[:number], slot, *state.slots[number + 1 :]))


def knows_slot(state: State, number: int) -> bool:
    return 0 <= number < len(state.slots)


# --- what workers say ---------------------------------------------------------------------------------------


def note_worker(state: State, event: WorkerStarted | WorkerHeartbeat, now: float) -> Decision:
    """A process is there: new (again), or still."""
    if event.role == "learner":
        return replace(state, learner=_seen(state.learner, event, now)), []
    if event.role == "scheduler" or not knows_slot(state, event.slot):
        return count(state, "ignored_unknown_worker"), []
    slot = state.slots[event.slot]
    if event.role == "rollout":
        known, slot = slot.rollout, replace(slot, rollout=_seen(slot.rollout, event, now))
    else:
        known, slot = slot.trainer, replace(slot, trainer=_seen(slot.trainer, event, now))
    commands: list[Command] = []
    if isinstance(event, WorkerHeartbeat) and slot.holder == "rollout" and event.lease == slot.lease:
        state = note_begin(state, now)
    if isinstance(event, WorkerStarted) or not known.started:
        state, slot = _restart(state, slot, event)
    elif known.lost:
        commands.append(Note("worker is back", {"worker": event.worker}))
    return forget_begin(put_slot(state, event.slot, slot)), commands


def note_begin(state: State, now: float) -> State:
    """A rollout worker works on a lease, or has answered."""
    return state if state.began_at is not None else replace(state, began_at=now)


def forget_begin(state: State) -> State:
    """All rollout workers are new, as after a resume: they start up again before the step goes on."""
    is_old = any(slot.rollout.worked for slot in state.slots) or any(b.answers for b in state.batches)
    return state if is_old or state.began_at is None else replace(state, began_at=None)


def _restart(state: State, slot: Slot, event: WorkerStarted | WorkerHeartbeat) -> tuple[State, Slot]:
    """What the process held is over; it gets a new lease for it. A rollout worker looks for requests even
    if none were admitted since: it may have some pending from before."""
    if event.role == "rollout":
        holder = None if slot.holder == "rollout" else slot.holder
        return state, replace(slot, holder=holder, admissions=-1)
    if slot.holder == "drafter":
        return count(state, "trainer_restarted"), end_late(slot)
    return state, slot


def _seen(known: Presence, event: WorkerStarted | WorkerHeartbeat, now: float) -> Presence:
    if isinstance(event, WorkerStarted):
        return Presence(started=True, seen_at=now)
    return Presence(
        started=True,
        seen_at=max(now, known.seen_at),
        worked=known.worked or event.lease > 0,
        running=event.running,
        tokens_per_s=event.tokens_per_s,
        acceptance_length=event.acceptance_length,
        policy_version=event.policy_version,
        drafter_version=event.drafter_version,
    )


def note_idle(state: State, event: WorkerIdle, now: float) -> State:
    """The rollout worker found nothing. If requests were admitted since it got the lease, it may have
    looked too early: `grant_leases` sends it again."""
    if not knows_slot(state, event.slot):
        return count(state, "ignored_unknown_worker")
    slot = state.slots[event.slot]
    if slot.holder != "rollout" or event.lease != slot.lease:
        return count(state, "ignored_old_lease")
    return put_slot(state, event.slot, replace(slot, holder=None, looked_at=now))


def note_yield(state: State, event: WorkerYielded) -> Decision:
    """The drafter trainer gave the slot back, asked or not."""
    if not knows_slot(state, event.slot):
        return count(state, "ignored_unknown_worker"), []
    slot = state.slots[event.slot]
    if slot.late_lease and event.lease == slot.late_lease:
        state = book_yield(state, event, slot.late_idle_s, asked=True)
        return put_slot(state, event.slot, replace(slot, late_lease=0, late_idle_s=0.0)), []
    if slot.holder != "drafter" or event.lease != slot.lease:
        return count(state, "ignored_old_lease"), []
    asked = slot.recalled_at is not None
    state = book_yield(state, event, slot.lease_idle_s, asked=asked)
    slot = replace(slot, holder=None, recalled_at=None, lease_idle_s=0.0)
    if asked:
        return put_slot(state, event.slot, slot), []
    kind = event.reason.partition(":")[0].strip() or "unsaid"
    slot = replace(slot, barred=kind, barred_at=state.shards_seen if kind == NO_DATA else state.admissions)
    state = count(put_slot(state, event.slot, slot), f"trainer_yielded_{kind}")
    if kind == NO_DATA or kind.startswith(BUDGET):
        return state, []
    return state, [Note("drafter trainer gave up its slot", {"slot": event.slot, "reason": event.reason})]


# --- time ---------------------------------------------------------------------------------------------------


def note_losses(state: State, now: float) -> Decision:
    """Processes that have been silent for worker_timeout_s. Their requests are claimed by others; a
    drafter lease is over at once."""
    commands: list[Command] = []
    for number, slot in enumerate(state.slots):
        for role, known in (("rollout", slot.rollout), ("drafter-trainer", slot.trainer)):
            if not known.up or now - known.seen_at <= state.settings.worker_timeout_s:
                continue
            state = count(state, f"worker_lost_{role}")
            commands.append(Note("worker is silent", {"worker": f"{role}-{number}"}))
            if role == "rollout":
                slot = replace(slot, rollout=replace(known, lost=True))
            else:
                slot = end_late(slot) if slot.holder == "drafter" else slot
                slot = replace(slot, trainer=replace(known, lost=True))
            state = put_slot(state, number, slot)
    return state, commands


def expire_recalls(state: State, now: float) -> Decision:
    """A slot that wasn't given back in time is taken; counted and logged, because design 5.5 promises it."""
    commands: list[Command] = []
    for number, slot in enumerate(state.slots):
        if slot.recalled_at is None or now - slot.recalled_at < state.settings.deadline_s:
            continue
        state = count(put_slot(state, number, end_late(slot)), "late_yields")
        facts = {"slot": number, "lease": slot.lease, "deadline_s": state.settings.deadline_s}
        commands.append(Note("slot was not given back in time, going on without", facts))
    return state, commands


# --- what follows -------------------------------------------------------------------------------------------


def recall_leases(state: State, now: float) -> Decision:
    """Asks drafter trainers for slots that the learner, or rollout work, needs; all of them at the end of
    the run."""
    commands: list[Command] = []
    turn = is_learners_turn(state) or is_ending(state)
    for number, slot in enumerate(state.slots):
        if slot.holder != "drafter" or slot.recalled_at is not None:
            continue
        if turn or has_rollout_work(state, slot, now):
            state = put_slot(state, number, replace(slot, recalled_at=now))
            commands.append(RecallLease(number, slot.lease, state.settings.deadline_s))
    return state, commands


def slots_are_free(state: State) -> bool:
    """Nobody who answers uses a slot. A lost rollout worker's device counts as free."""
    return all(slot.holder != "drafter" and not (slot.holder == "rollout" and slot.rollout.up) for slot in state.slots)


def lease_to_learner(state: State) -> State:
    """Needs no message: the order to train is the learner's lease."""
    slots = (replace(slot, holder="learner", lease=slot.lease + 1) for slot in state.slots)
    return replace(state, slots=tuple(slots))


def free_learner_slots(state: State) -> State:
    slots = (replace(slot, holder=None) if slot.holder == "learner" else slot for slot in state.slots)
    return replace(state, slots=tuple(slots))


def grant_leases(state: State, now: float) -> Decision:
    """Nobody's slots go to rollout work if there is some, else to the drafter in idle time. At the
    learner's turn and at the end there is neither."""
    commands: list[Command] = []
    orphaned = is_orphaned(state, now)
    for number, slot in enumerate(state.slots):
        if slot.holder is not None:
            continue
        holder = _next_holder(state, slot, now, orphaned=orphaned)
        if holder is None:
            continue
        slot = replace(slot, holder=holder, lease=slot.lease + 1, assigned=0, share=(0, 1), barred="")
        if holder == "rollout":
            slot = replace(slot, admissions=state.admissions)
        state = put_slot(state, number, slot)
        commands.append(GrantLease(number, holder, slot.lease))
    return state, commands


def _next_holder(state: State, slot: Slot, now: float, *, orphaned: bool) -> Holder | None:
    if has_rollout_work(state, slot, now):
        new_work = slot.admissions != state.admissions
        rested = now >= slot.looked_at + state.settings.retry_s
        if new_work or rested:
            return "rollout"
    if orphaned or not is_idle_time(state):
        return None
    return "drafter" if why_unused(state, slot, now) is None else None
