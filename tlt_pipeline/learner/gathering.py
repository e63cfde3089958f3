"""Completions that wait for their step. No I/O.

Completions and orders arrive in any order and more than once. A completion is kept, unacknowledged, until the
step that names it is trained; so a crash loses none, and none is trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tlt_pipeline.bus.streams import Delivery
from tlt_pipeline.messages import Completion, TrainStep


@dataclass(frozen=True)
class Batch:
    """A step's completions, in the order's order. `refused`: too old to be trained on."""

    completions: tuple[Completion, ...]
    deliveries: tuple[Delivery, ...]
    refused: tuple[Delivery, ...]


class Gathering:
    """`trained`: steps that are done, 0 to trained - 1. `counts`: what was set aside, by reason."""

    def __init__(self, trained: int, max_staleness: int) -> None:
        self.trained = trained
        self.max_staleness = max_staleness
        self.counts: Counter[str] = Counter()
        self._held: dict[str, Delivery] = {}

    def add(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Keeps what a step to come may name; returns the rest, to be acknowledged: evaluation, steps that
        are done, and duplicates."""
        done: list[Delivery] = []
        for delivery in deliveries:
            reason = self._reason_to_drop(delivery)
            if reason is None:
                self._held[_completion(delivery).request_id] = delivery
            else:
                self.counts[reason] += 1
                done.append(delivery)
        return done

    def missing(self, order: TrainStep) -> list[str]:
        return [request for request in order.request_ids if request not in self._held]

    def take(self, order: TrainStep) -> Batch:
        """The order's completions, as far as they are here."""
        fresh: list[Delivery] = []
        refused: list[Delivery] = []
        for request in dict.fromkeys(order.request_ids):
            delivery = self._held.get(request)
            if delivery is None:
                continue
            age = order.policy_version - _completion(delivery).policy_version
            (fresh if 0 <= age <= self.max_staleness else refused).append(delivery)
        self.counts["stale"] += len(refused)
        return Batch(tuple(map(_completion, fresh)), tuple(fresh), tuple(refused))

    def close(self, order: TrainStep) -> list[Delivery]:
        """The step is done: forgets what it named; returns completions of its step that it didn't name."""
        for request in order.request_ids:
            self._held.pop(request, None)
        self.trained = max(self.trained, order.step + 1)
        late = [delivery for delivery in self._held.values() if _completion(delivery).step < self.trained]
        for delivery in late:
            del self._held[_completion(delivery).request_id]
        self.counts["late"] += len(late)
        return late

    def _reason_to_drop(self, delivery: Delivery) -> str | None:
        completion = _completion(delivery)
        if completion.purpose != "train":
            return "evaluation"
        if completion.step < self.trained:
            return "late"
        return "duplicate" if completion.request_id in self._held else None


def _completion(delivery: Delivery) -> Completion:
    assert isinstance(delivery.message, Completion)
    return delivery.message
