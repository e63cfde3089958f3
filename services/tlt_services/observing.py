"""A rollout worker's account of its strategies, as metrics and as a line at the end."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tlt_pipeline.engine.accounts import StrategyAccount, Use
from tlt_pipeline.telemetry.metrics import Metrics

SHOWN = 6
"""Strategies in the line at the end: those that took the most time."""


class StrategyMetrics:
    """Keeps counters in step with the engine's account, which another thread goes on writing."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[tuple[str, int], Use] = {}
        self._told_reasons: dict[str, int] = {}
        self._told_switches = 0

    def update(self, account: StrategyAccount) -> None:
        for key, use in list(account.uses.items()):
            now, before = deepcopy(use), self._told.get(key, Use())
            steps, tokens, seconds = now.steps - before.steps, now.tokens - before.tokens, now.seconds - before.seconds
            if steps:
                self._metrics.count_steps(*key, steps=steps, tokens=tokens, seconds=seconds)
            told = before.accepted + [0] * (len(now.accepted) - len(before.accepted))
            for position, (count, known) in enumerate(zip(now.accepted, told, strict=True)):
                self._metrics.count_accepted(key[0], position, count - known)
            self._told[key] = now
        for reason, count in list(account.not_speculated.items()):
            self._metrics.count_not_speculated(reason, count - self._told_reasons.get(reason, 0))
            self._told_reasons[reason] = count
        self._metrics.switches.inc(account.switches - self._told_switches)
        self._told_switches = account.switches


def describe(account: StrategyAccount) -> dict[str, Any]:
    """For the log: share of the time, tokens a second and acceptance length, of the strategies used most."""
    total = sum(use.seconds for use in account.uses.values())
    used = sorted(account.uses.items(), key=lambda item: -item[1].seconds)[:SHOWN]
    return {
        "switches": account.switches,
        "not_speculated": dict(account.not_speculated),
        **{
            f"{strategy}@{batch}": f"{use.seconds / total:.0%} of time, {use.tokens_per_s:.0f} tokens/s, "
            f"acceptance length {use.acceptance_length:.2f}"
            for (strategy, batch), use in used
        },
    }
