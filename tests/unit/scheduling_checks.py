"""Invariants of design section 5, checked while a run in virtual time goes on, and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tlt_pipeline.scheduling.state import Account

if TYPE_CHECKING:
    from tests.unit.scheduling_world import World


def check_state(world: World, before: Account) -> None:
    account = world.state.account
    past = world.records
    idle_s = sum(r.slot_idle_s for r in past) + account.idle_s
    used_s = sum(r.slot_idle_used_s for r in past) + account.used_s
    if account.idle_s >= before.idle_s:  # else the record of a step is on its way
        assert used_s <= idle_s + 1e-6, "more idle time used than there was"
    assert sum(shard.size for shard in world.state.shards) <= world.settings.bytes_quota
    assert len({shard.shard_id for shard in world.state.shards}) == len(world.state.shards)


def check_end(world: World) -> None:
    """Once each: trained exactly once, or in the dead letters."""
    admitted = {name for name in world.requests if name.startswith("s")}
    assert world.finished and set(world.trained) | (world.buried & admitted) == admitted
    assert not set(world.trained) & world.buried
    assert all(times == 1 for times in world.trained.values())
    assert [record.step for record in world.records] == list(range(world.settings.steps))
    assert len(admitted) == world.settings.steps * world.settings.prompts * world.settings.group_size
    assert all(slot.holder != "drafter" for slot in world.state.slots)
