"""A rollout worker loads drafters forward only, though it hears old broadcasts again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import structlog
from tiny import tiny_settings

from tlt_pipeline.config import RunConfig
from tlt_pipeline.messages import WeightsPublished
from tlt_services.loading import Loading


def published(version: int) -> WeightsPublished:
    facts = {"parent": 0, "policy_version": 0, "step": 0, "path": "", "size": 0, "sha256": ""}
    return WeightsPublished(model="drafter", version=version, **facts)  # type: ignore[arg-type]


class Bus:
    """What Redis tells a worker that starts when version 17 is the newest; then 18 comes."""

    async def latest(self, name: str) -> WeightsPublished:
        return published(17)

    async def listen(self, stream: str, after: str, *, block_s: float) -> list[tuple[str, WeightsPublished]]:
        if after == "0":
            return [(str(version), published(version)) for version in range(1, 19)]
        raise asyncio.CancelledError


class BusyEngine:
    """Takes what it is given only after its current step."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.given: list[int] = []

    async def load_drafter(self, store: Any, published: WeightsPublished) -> None:
        self.given.append(published.version)


async def test_old_broadcasts_bring_no_old_drafter(tmp_path) -> None:
    async def wait_for(what: str, probe: Any) -> Any:
        return await probe()

    config = RunConfig.model_validate(tiny_settings(tmp_path))
    actor: Any = SimpleNamespace(config=config, bus=Bus(), gauges={}, log=structlog.get_logger(), wait_for=wait_for)
    store: Any = None
    engine: Any = BusyEngine()
    loading = Loading(actor, store, engine, idle=lambda: False)
    await loading.load_first_drafter()
    with contextlib.suppress(asyncio.CancelledError):
        await loading.follow()
    assert engine.given == [17, 18]
