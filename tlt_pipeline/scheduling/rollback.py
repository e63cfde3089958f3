"""Back to an earlier drafter when a newer one drafts clearly worse in the rollout, whatever held-out data said of it.

Two versions are compared within the same answers only: those that were being written when the newer one came. So both
saw the same policy version and the same prompts; acceptance of different answers differs by more than that of
versions. What is compared is how often the first proposal of a draft was right, which, unlike the number accepted,
doesn't depend on how deep the engine chose to draft.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from tlt_pipeline.scheduling.accounts import count
from tlt_pipeline.scheduling.events import Command, CompletionSeen, Note, RollBack
from tlt_pipeline.scheduling.state import Duel, Live, State

ENOUGH_DRAFTS = 200
"""Of either version."""
MARGIN = 0.1
"""Worse by less than this share isn't worth a version."""
DEVIATIONS = 3.0
"""Worse by less than so many standard deviations may be chance."""


def note_drafts(state: State, event: CompletionSeen) -> State:
    """What a finished answer says of the newest drafter version and of the one before."""
    newest = state.drafter_version
    if len(event.drafters) < 2 or event.drafters[-1].version != newest:
        return state
    before, now = event.drafters[-2:]
    live = state.live if state.live.version == newest else Live(newest)
    duel = live.duels.get(before.version, Duel())
    duel = Duel(
        duel.drafts_before + before.drafts,
        duel.hits_before + before.hits,
        duel.drafts_now + now.drafts,
        duel.hits_now + now.hits,
    )
    return replace(state, live=replace(live, duels={**live.duels, before.version: duel}))


def roll_back(state: State) -> tuple[State, list[Command]]:
    """Has the weights of the better version published again, once for each version that is worse."""
    live = state.live
    if live.version != state.drafter_version or live.rolled_back:
        return state, []
    lost = [version for version, duel in live.duels.items() if is_clearly_worse(duel)]
    trainers = [number for number, slot in enumerate(state.slots) if slot.trainer.up]
    if not lost or not trainers:
        return state, []
    to = max(lost)
    state = count(replace(state, live=replace(live, rolled_back=True)), "drafter_rolled_back")
    facts = {"version": live.version, "to": to, **live.duels[to]._asdict()}
    return state, [RollBack(trainers[0], live.version, to), Note("drafter drafts worse than the one before", facts)]


def is_clearly_worse(duel: Duel) -> bool:
    if min(duel.drafts_before, duel.drafts_now) < ENOUGH_DRAFTS:
        return False
    before, now = duel.hits_before / duel.drafts_before, duel.hits_now / duel.drafts_now
    both = (duel.hits_before + duel.hits_now) / (duel.drafts_before + duel.drafts_now)
    chance = sqrt(both * (1.0 - both) * (1.0 / duel.drafts_before + 1.0 / duel.drafts_now))
    return now < before * (1.0 - MARGIN) and before - now > DEVIATIONS * chance
