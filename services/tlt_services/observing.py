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
        self._told_switches, self._told_stand_ins = 0, 0

    def update(self, account: StrategyAccount) -> None:
        for key, use in list(account.uses.items()):
            self._update_use(key, deepcopy(use))
        for reason, count in list(account.not_speculated.items()):
            self._metrics.count_not_speculated(reason, count - self._told_reasons.get(reason, 0))
            self._told_reasons[reason] = count
        switches, stand_ins = account.switches, account.stand_ins
        self._metrics.switches.inc(switches - self._told_switches)
        self._metrics.stand_ins.inc(stand_ins - self._told_stand_ins)
        self._told_switches, self._told_stand_ins = switches, stand_ins

    def _update_use(self, key: tuple[str, int], now: Use) -> None:
        before = self._told.get(key, Use())
        self._told[key] = now
        if now.steps == before.steps:
            return
        self._metrics.count_steps(
            *key,
            steps=now.steps - before.steps,
            tokens=now.tokens - before.tokens,
            seconds=now.seconds - before.seconds,
            drafts=now.drafts - before.drafts,
            draft_tokens=now.draft_tokens - before.draft_tokens,
            accepted_tokens=sum(now.accepted) - sum(before.accepted),
        )
        told = before.accepted + [0] * (len(now.accepted) - len(before.accepted))
        for position, (count, known) in enumerate(zip(now.accepted, told, strict=True)):
            self._metrics.count_accepted(*key, position, count - known)


def describe(account: StrategyAccount) -> dict[str, Any]:
    """For the log: share of the time, tokens a second and acceptance, of the strategies used most."""
    used = sorted(account.uses.items(), key=lambda item: -item[1].seconds)[:SHOWN]
    return {
        "switches": account.switches,
        "not_speculated": dict(account.not_speculated),
        **({"stand_ins": account.stand_ins} if account.stand_ins else {}),
        **{
            f"{strategy}@{batch}": _describe(use, account.share_of_time(strategy, batch))
            for (strategy, batch), use in used
        },
    }


def _describe(use: Use, share: float) -> str:
    told = f"{share:.0%} of time, {use.tokens_per_s:.0f} tokens/s"
    if not use.accepted:
        return told
    by_position = " ".join(f"{rate:.2f}" for rate in use.acceptance)
    return f"{told}, acceptance length {use.acceptance_length:.2f} ({by_position})"
