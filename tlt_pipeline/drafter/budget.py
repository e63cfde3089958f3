"""Whether training pays: one slot's decision to train, to stop early, or to rest.

A trained drafter saves time in proportion to the verify passes it saves, which is what held-out loss measures. So
training pays as long as it keeps lowering that loss by enough to be worth publishing. When it has not for a while, the
slot stops. It rests until the policy has moved so far that the drafter drafts worse than it did, or until it is time
for another try; tries that bring nothing are made ever more seldom. (Fixed schedules waste most of their work late.)
"""

from __future__ import annotations

from tlt_pipeline.config import BudgetConfig

NO_GAIN = "budget_no_gain"
RESTING = "budget_resting"
_TRY = 0.25
"""Of the patience, for a try after a rest."""


class Budget:
    """Told of every lease and judgement; answers with the reason not to train, or None."""

    def __init__(self, settings: BudgetConfig) -> None:
        self._settings = settings
        self._spent_s = 0.0
        self._best_length: float | None = None
        self._rest = 0
        self._rested = 0

    @property
    def is_resting(self) -> bool:
        """`begin` needs to know how the published drafter does now."""
        return self._rest > 0

    def begin(self, acceptance_length: float | None) -> str | None:
        """A lease begins; `acceptance_length` of the published drafter on held-out data, None where not known."""
        if not self.is_resting:
            return None
        if self._has_fallen(acceptance_length):
            self._rest = self._rested = 0
            self._spent_s = 0.0
            return None
        self._rested += 1
        if self._rested <= self._rest:
            return RESTING
        if self._rested == self._rest + 1:  # the try begins; it may take several leases
            self._spent_s = (1.0 - _TRY) * self._settings.patience_s
        return None

    def note(self, trained_s: float, acceptance_length: float, *, worth: bool) -> str | None:
        """A judgement after `trained_s` of training: was it worth publishing, and how well does the best drafter do
        that is published then?"""
        if worth:
            self._spent_s, self._rest, self._rested = 0.0, 0, 0
            return None
        self._spent_s += trained_s
        if not self._settings.patience_s or self._spent_s < self._settings.patience_s:
            return None
        self._best_length = acceptance_length
        self._rest = min(2 * self._rest or 1, self._settings.longest_rest)
        self._spent_s, self._rested = 0.0, 0
        return NO_GAIN

    def _has_fallen(self, acceptance_length: float | None) -> bool:
        if acceptance_length is None or self._best_length is None:
            return False
        return acceptance_length < self._best_length * (1.0 - self._settings.wake_drop)
