"""Whether a decode step speculates: decided by what was measured, per batch size, so that it is never slower for long.

For each bucket of batch sizes the gate keeps a moving average of committed tokens a second with and without
speculation, takes the better, and looks at the other one again from time to time. A new drafter version is tried at
once. Timing decides, so two runs may choose differently; the tokens can't differ (design 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL_STEPS = 3
"""A look at an arm lasts so many steps; the first one is not counted: it pays for catching up."""
LOOK_EVERY = 48
"""Steps between two looks at the arm that is not taken."""
KEPT = 0.8
"""Share that the moving average keeps at a step."""


@dataclass
class Arm:
    tokens_per_s: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-9)
        self.tokens_per_s = rate if self.tokens_per_s is None else KEPT * self.tokens_per_s + (1 - KEPT) * rate


@dataclass
class Bucket:
    off: Arm = field(default_factory=Arm)
    on: Arm = field(default_factory=Arm)
    since_look: int = 0
    trial_left: int = 0
    speculates: bool = False


class SpeculationGate:
    def __init__(self, max_batch: int) -> None:
        """`max_batch`: with more running answers it never speculates."""
        self.max_batch = max_batch
        self._buckets: dict[int, Bucket] = {}
        self._current: Bucket | None = None
        self._uncounted = False

    def forget(self) -> None:
        """Another drafter: what speculation brought with the old one says little."""
        for bucket in self._buckets.values():
            bucket.on = Arm()

    def speculates(self, batch: int) -> bool:
        """The choice for the step to come."""
        if batch > self.max_batch:
            self._current = None
            return False
        changed = self._current
        bucket = self._current = self._buckets.setdefault(batch.bit_length(), Bucket())
        before = bucket.speculates
        if bucket.trial_left:
            bucket.trial_left -= 1
        elif bucket.on.tokens_per_s is None or bucket.off.tokens_per_s is None:
            self._try(bucket, bucket.on.tokens_per_s is None)
        elif bucket.since_look >= LOOK_EVERY:
            self._try(bucket, not self._better(bucket))
        else:
            bucket.speculates = self._better(bucket)
        bucket.since_look += 1
        self._uncounted = bucket.speculates and (changed is not bucket or not before)
        return bucket.speculates

    def measured(self, tokens: int, seconds: float) -> None:
        """What the step brought: tokens committed, wall seconds."""
        if self._current is not None and not self._uncounted:
            (self._current.on if self._current.speculates else self._current.off).add(tokens, seconds)

    @staticmethod
    def _better(bucket: Bucket) -> bool:
        assert bucket.on.tokens_per_s is not None and bucket.off.tokens_per_s is not None
        return bucket.on.tokens_per_s > bucket.off.tokens_per_s

    @staticmethod
    def _try(bucket: Bucket, speculate: bool) -> None:
        bucket.speculates, bucket.trial_left, bucket.since_look = speculate, TRIAL_STEPS - 1, 0
