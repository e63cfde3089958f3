"""A cancelled reader ends: each process ends by cancelling its readers, and would hang otherwise."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from tlt_pipeline.bus import Bus
from tlt_pipeline.messages import COMPLETIONS


async def test_no_cancel_is_lost(connect: Callable[..., Awaitable[Bus]]) -> None:
    """At whatever moment it comes. One in ten was lost while redis-py bounded its writes with asyncio.wait_for."""
    bus = await connect("learner")
    moments = random.Random(0)

    async def read_on() -> None:
        while True:
            await bus.read(COMPLETIONS, "learner", count=10, block_s=0.002)

    for _ in range(150):
        reader = asyncio.create_task(read_on())
        await asyncio.sleep(moments.uniform(0, 0.01))
        reader.cancel()
        ended, _ = await asyncio.wait({reader}, timeout=2.0)
        assert ended
