"""Whole runs in virtual time: crashing workers, a crashing scheduler, late, doubled and reordered messages.

The world asserts the invariants of design section 5 while it runs (tests/unit/scheduling_world.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.scheduling_checks import check_end
from tests.unit.scheduling_world import World
from tlt_pipeline.scheduling.state import Settings

SEEDS, PARTS = 300, 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_run_ends_with_every_request_trained_once_or_given_up(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        world = World(seed)
        try:
            world.run()
            if world.failed is None:
                check_end(world)
            else:
                assert "every request of step" in world.failed
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {world.settings}: {error}") from error
        seen.update(world.seen)
    for trouble in ("rollout_crash", "trainer_crash", "scheduler_crash", "worker is silent"):
        assert seen[trouble] > 0, "the worlds were too kind to test anything"


@pytest.mark.parametrize("staleness", range(4))
@pytest.mark.parametrize("colocated", [True, False])
def test_which_version_writes_an_answer_does_not_depend_on_timing(staleness: int, colocated: bool) -> None:
    settings = Settings(
        steps=6,
        prompts=2,
        group_size=2,
        slots=3,
        max_staleness=staleness,
        colocated=colocated,
        worker_timeout_s=4.0,
        bytes_quota=40,
    )
    versions: set[tuple[tuple[str, int], ...]] = set()
    for seed in range(6):
        world = World(seed, settings).run()
        assert world.failed is None
        check_end(world)
        versions.add(tuple(sorted((name, request.version) for name, request in world.requests.items())))
    assert len(versions) == 1


def test_without_trouble_most_of_the_idle_time_is_used_and_nothing_is_skipped() -> None:
    settings = Settings(steps=12, prompts=4, group_size=4, slots=2, bytes_quota=1000)
    used = idle = 0.0
    for seed in range(4):
        world = World(seed, settings, trouble=0.0).run()
        check_end(world)
        used += sum(record.slot_idle_used_s for record in world.records)
        idle += sum(record.slot_idle_s for record in world.records)
        assert not [note for note in world.seen if note not in ("too_old", "over_bytes_quota")]
    assert idle > 0 and used / idle > 0.5
