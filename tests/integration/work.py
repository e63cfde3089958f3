"""Work on a bus, for tests."""

from __future__ import annotations

from tests.samples import completion, request
from tlt_pipeline import messages as m
from tlt_pipeline.bus import Bus, Delivery

ROLLOUT = "rollout"
SCHEDULER = "scheduler"


async def submit(bus: Bus, count: int) -> list[m.RolloutRequest]:
    requests = [request(number) for number in range(count)]
    for item in requests:
        assert await bus.submit(m.REQUESTS, item, item.request_id) == "queued"
    return requests


async def take(bus: Bus, count: int = 1) -> list[Delivery]:
    """Exactly `count` requests."""
    taken: list[Delivery] = []
    while len(taken) < count:
        found = await bus.read(m.REQUESTS, ROLLOUT, count=count - len(taken), block_s=5)
        assert found
        taken += found
    return taken


def result_of(delivery: Delivery) -> m.Completion:
    assert isinstance(delivery.message, m.RolloutRequest)
    return completion(delivery.message, attempt=delivery.attempt)


def ids(deliveries: list[Delivery]) -> list[str]:
    return [getattr(delivery.message, "request_id", "") for delivery in deliveries]


async def dead_letters(bus: Bus) -> list[m.DeadLetter]:
    found = await bus.read(m.DEAD_LETTERS, SCHEDULER, count=1000, block_s=0)
    return [delivery.message for delivery in found if isinstance(delivery.message, m.DeadLetter)]
