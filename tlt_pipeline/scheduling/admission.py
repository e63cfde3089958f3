"""When requests go out, when answers are complete, when the learner trains: order and staleness.

Version v is the policy after v updates; step s trains at version s. Its requests are admitted as soon as
version s - max_staleness exists, and carry the version current then. So which version writes an answer
follows from the step alone, not from timing, and a run stays reproducible with any max_staleness.

A learner on the slots' own devices can't overlap with rollouts. There, max_staleness k means that k + 1
steps are admitted together and then trained one after the other: one long tail instead of k + 1.
"""

from __future__ import annotations

from dataclasses import replace

from tlt_pipeline.failures import EXIT_FATAL
from tlt_pipeline.messages import COMPLETIONS, Purpose, StepTrained, WeightsPublished
from tlt_pipeline.scheduling.accounts import close_step, count
from tlt_pipeline.scheduling.events import (
    Command,
    CompletionSeen,
    Fail,
    Note,
    RecordStep,
    SendShutdown,
    SendTrainStep,
    SubmitStep,
)
from tlt_pipeline.scheduling.ids import RequestId, parse_request_id
from tlt_pipeline.scheduling.leases import (
    Decision,
    free_learner_slots,
    lease_to_learner,
    note_begin,
    slots_are_free,
)
from tlt_pipeline.scheduling.records import mean
from tlt_pipeline.scheduling.rollback import note_drafts
from tlt_pipeline.scheduling.state import Batch, State, Training
from tlt_pipeline.scheduling.waiting import is_eval_due, live_steps, ready_batch


def fail(state: State, reason: str, code: int = EXIT_FATAL) -> Decision:
    return replace(state, failed=reason), [SendShutdown(reason), Fail(reason, code)]


# --- versions -----------------------------------------------------------------------------------------------


def note_weights(state: State, event: WeightsPublished) -> State:
    if event.model == "policy":
        return note_policy(state, event.version)
    if event.version in state.drafter_versions or event.version <= state.drafter_floor:
        return state
    account = replace(state.account, drafter_versions=state.account.drafter_versions + 1)
    return replace(state, drafter_versions=state.drafter_versions | {event.version}, account=account)


def note_policy(state: State, version: int) -> State:
    """The first version that is heard of says where the run begins: 0, or on resume the last one trained."""
    if state.next_step is None:
        last_eval = version - 1 if version else -1
        state = replace(state, next_step=version, trained=version, last_eval=last_eval)
    return replace(state, policy_version=max(state.policy_version, version))


# --- admission ----------------------------------------------------------------------------------------------


def admit(state: State, now: float) -> Decision:
    """Submits what may be. Evaluations come last: they fill the tail of the step, and are waited for
    anyway before its version is trained on."""
    commands: list[Command] = []
    if state.next_step is None:
        return state, commands
    together = not (state.settings.colocated and live_steps(state))
    while together and _may_admit(state):
        step = state.next_step or 0
        state, command = _submit(replace(state, next_step=step + 1), step, "train", now)
        commands.append(command)
    if is_eval_due(state):
        version = state.policy_version
        state, command = _submit(replace(state, last_eval=version), version, "eval", now)
        commands.append(command)
    return state, commands


def _may_admit(state: State) -> bool:
    assert state.next_step is not None
    ahead = state.next_step - state.policy_version
    return state.next_step < state.settings.steps and ahead <= state.settings.max_staleness


def _submit(state: State, step: int, purpose: Purpose, now: float) -> tuple[State, SubmitStep]:
    settings, version = state.settings, state.policy_version
    prompts, group_size = settings.prompts, settings.group_size
    if purpose == "eval":
        prompts, group_size = settings.eval_prompts, 1
    batch = Batch(step, purpose, version, prompts, group_size, admitted_at=now)
    state = replace(state, batches=(*state.batches, batch), admissions=state.admissions + 1)
    return state, SubmitStep(step, version, purpose, prompts, group_size)


# --- answers ------------------------------------------------------------------------------------------------


def note_completion(state: State, event: CompletionSeen, now: float) -> Decision:
    """Twice the same, or one for a step that is over, counts and changes nothing."""
    found = _find(state, event.request_id)
    if found is None:
        return count(state, "ignored_completion"), []
    batch, key = found
    if key in batch.answers or key in batch.dead:
        return count(state, "ignored_completion"), []
    state = note_begin(state, batch.admitted_at)
    if event.policy_version != batch.policy_version:
        return fail(
            state,
            f"{event.request_id} was written by policy version {event.policy_version} instead of "
            f"{batch.policy_version}: the staleness bound can't be kept, please report this",
        )
    state = note_drafts(count(state, f"answers_{event.claim}"), event)
    return _put_batch(state, replace(batch, answers={**batch.answers, key: event.answer}), now), []


def note_dead(state: State, request_id: str | None, stream: str, reason: str, now: float) -> Decision:
    """A request was given up: it leaves its step. A completion that the learner couldn't take leaves it
    too, while that can still be."""
    state = replace(state, account=replace(state.account, dead_letters=state.account.dead_letters + 1))
    warned: list[Command] = [Note("dead letter", {"stream": stream, "request": request_id, "reason": reason})]
    found = _find(state, request_id or "")
    if found is None:
        return state, warned
    batch, key = found
    in_training = state.training is not None and state.training.step == batch.step and batch.purpose == "train"
    if key in batch.dead or in_training or (key in batch.answers and stream != COMPLETIONS):
        return state, warned
    answers = {known: answer for known, answer in batch.answers.items() if known != key}
    return _put_batch(state, replace(batch, answers=answers, dead=batch.dead | {key}), now), warned


def _find(state: State, request_id: str) -> tuple[Batch, int] | None:
    """The batch that owns the request, and the request's number in it."""
    name = parse_request_id(request_id)
    if name is None:
        return None
    for batch in state.batches:
        if (batch.purpose, batch.step) == (name.purpose, name.step):
            known = name.prompt < batch.prompts and name.index < batch.group_size
            return (batch, name.prompt * batch.group_size + name.index) if known else None
    return None


def _put_batch(state: State, batch: Batch, now: float) -> State:
    """An evaluation that is complete becomes a number; a step keeps its answers until it is trained."""
    others = [b for b in state.batches if (b.purpose, b.step) != (batch.purpose, batch.step)]
    if batch.outstanding == 0 and batch.purpose == "eval":
        score = mean(answer.reward for answer in batch.answers.values())
        return replace(state, batches=tuple(others), evals={**state.evals, batch.step: score})
    if batch.outstanding == 0 and batch.finished_at is None:
        batch = replace(batch, finished_at=now)
    batches = sorted([*others, batch], key=lambda b: (b.step, b.purpose))
    return replace(state, batches=tuple(batches))


# --- training -----------------------------------------------------------------------------------------------


def begin_training(state: State, now: float) -> Decision:
    """Sends the next complete step to the learner, once the slots are free where it needs them."""
    batch = ready_batch(state)
    if batch is None:
        return state, []
    if state.ready_at is None:
        state = replace(state, ready_at=now)
    if not batch.answers:
        return fail(state, f"every request of step {batch.step} was given up; the dead letters say why")
    if batch.step - batch.policy_version > state.settings.max_staleness:
        return fail(state, f"step {batch.step} is older than max_staleness allows, please report this")
    if state.settings.colocated:
        if not slots_are_free(state):
            return state, []
        state = lease_to_learner(state)
    assert state.ready_at is not None
    training = Training(batch.step, sent_at=now, waited_s=max(0.0, now - state.ready_at))
    order = SendTrainStep(batch.step, batch.step, _request_ids(batch), len(batch.dead))
    return replace(state, training=training, ready_at=None), [order]


def _request_ids(batch: Batch) -> tuple[str, ...]:
    """In the order of prompts, so that the learner's sums don't depend on who finished first."""
    places = (divmod(key, batch.group_size) for key in sorted(batch.answers))
    return tuple(str(RequestId("train", batch.step, prompt, index)) for prompt, index in places)


def note_trained(state: State, event: StepTrained, now: float) -> Decision:
    if state.training is None or event.step != state.training.step:
        return count(state, "ignored_step_trained"), []
    batch = next(b for b in live_steps(state) if b.step == event.step)
    commands: list[Command] = []
    if event.trained != len(batch.answers):
        facts = {"step": event.step, "sent": len(batch.answers), "trained": event.trained}
        commands.append(Note("the learner did not train on all answers", facts))
    state = note_policy(state, event.policy_version)
    state, record = close_step(state, batch, event, now)
    batches = tuple(b for b in state.batches if b is not batch)
    state = replace(state, batches=batches, training=None, trained=event.step + 1)
    return free_learner_slots(state), [*commands, RecordStep(record)]
