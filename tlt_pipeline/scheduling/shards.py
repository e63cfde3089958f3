"""The buffer of drafter-training data: what is kept, and who gets what.

A trainer that is alone gets everything in the buffer, and what arrives while it trains. Several share out what there
is and what arrives, and their results are merged; what one of them has got before the others came stays with it.
Held-out shards go to all: versions are compared on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tlt_pipeline.messages import HiddenShard, encode
from tlt_pipeline.scheduling.accounts import count
from tlt_pipeline.scheduling.events import AssignShards, Command, DropShards
from tlt_pipeline.scheduling.state import Shard, State

SHARDS_A_MESSAGE = 256


def take_shard(state: State, shard: HiddenShard) -> State:
    """Into the buffer; twice the same one counts once."""
    if any(known.shard_id == shard.shard_id for known in state.shards):
        return count(state, "shard_duplicate")
    number = state.shards_seen + 1
    entry = Shard(
        number=number,
        shard_id=shard.shard_id,
        blob=shard.blob.name,
        size=shard.blob.size,
        step=shard.step,
        held_out=shard.held_out,
        body=encode(shard),
        policy_version=shard.policy_version,
        worth=shard.worth,
    )
    return replace(state, shards=(*state.shards, entry), shards_seen=number)


def forget_missing(state: State, names: Collection[str]) -> State:
    """After a restart: without the shards whose blobs are gone, for example with a machine's shared
    memory."""
    return _drop(state, lambda shard: shard.blob not in names, "missing")[0]


def evict_shards(state: State) -> tuple[State, list[Command]]:
    """Keeps the buffer within keep_steps and bytes_quota; the rest is dropped, with the reason counted."""
    if not state.shards:
        return state, []
    if not state.settings.train_drafter:
        return _drop(state, lambda _: True, "drafter_training_off")
    state, old = _evict_old(state)
    state, over = _evict_over_quota(state)
    return state, [*old, *over]


def _evict_old(state: State) -> tuple[State, list[Command]]:
    """By the newest step seen, so that a step without shards yet doesn't empty the buffer. The newest
    held-out shards stay: without any, no version could be compared."""
    oldest = max(shard.step for shard in state.shards) - state.settings.keep_steps + 1
    held_out = max((shard.step for shard in state.shards if shard.held_out), default=oldest)
    return _drop(state, lambda shard: shard.step < (min(oldest, held_out) if shard.held_out else oldest), "too_old")


def _evict_over_quota(state: State) -> tuple[State, list[Command]]:
    """Those of the oldest policy version first, of one version those worth least; held-out ones last."""
    over = sum(shard.size for shard in state.shards) - state.settings.bytes_quota
    doomed: set[int] = set()
    for shard in sorted(state.shards, key=_value):
        if over <= 0:
            break
        doomed.add(shard.number)
        over -= shard.size
    return _drop(state, lambda shard: shard.number in doomed, "over_bytes_quota")


def _value(shard: Shard) -> tuple[bool, int, float, int]:
    return shard.held_out, shard.policy_version, shard.worth, shard.number


def _drop(state: State, goes: Callable[[Shard], bool], reason: str) -> tuple[State, list[Command]]:
    gone = tuple(shard for shard in state.shards if goes(shard))
    if not gone:
        return state, []
    state = replace(state, shards=tuple(shard for shard in state.shards if not goes(shard)))
    state = count(state, f"shards_dropped_{reason}", len(gone))
    return state, [DropShards(tuple(shard.blob for shard in gone), reason)]


def assign_shards(state: State) -> tuple[State, list[Command]]:
    """To each training slot what it doesn't have yet of its share, in pieces that fit a message."""
    slots, commands = list(state.slots), list[Command]()
    training = [n for n, slot in enumerate(slots) if slot.holder == "drafter" and slot.recalled_at is None]
    for place, number in enumerate(training):
        slot, share = slots[number], (place, len(training))
        if share != slot.share and share[1] <= slot.share[1]:
            slot = replace(slot, assigned=0)  # another one's shards are left to it; the trainer knows what it has
        if slot.assigned != state.shards_seen:
            bodies = [shard.body for shard in _share_of(state, slot.assigned, *share)]
            for start in range(0, len(bodies), SHARDS_A_MESSAGE):
                piece = tuple(bodies[start : start + SHARDS_A_MESSAGE])
                commands.append(AssignShards(number, slot.lease, piece))
        slots[number] = replace(slot, assigned=state.shards_seen, share=share)
    return replace(state, slots=tuple(slots)), commands


def _share_of(state: State, after: int, place: int, sharers: int) -> list[Shard]:
    """Every `sharers`-th one, from `place` on; everything where there are too few to share out."""
    listed = [shard for shard in state.shards if not shard.held_out]
    if len(listed) >= 2 * sharers:
        listed = [shard for shard in listed if shard.number % sharers == place]
    own = {shard.number for shard in listed}
    return [s for s in state.shards if s.number > after and (s.held_out or s.number in own)]
