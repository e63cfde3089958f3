"""What the spot trainer did with idle time, and what it cost: the one place that computes it, for summary.json and for
`tlt status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, fsum
from typing import Any, TypeVar

from tlt_pipeline.scheduling.records import StepRecord
from tlt_pipeline.scheduling.state import Account
from tlt_pipeline.scheduling.waiting import BUDGET

K = TypeVar("K", int, str)

RESTED = f"trainer_yielded_{BUDGET}"
REFUSED = "drafter_refused_"
"""Counts of this prefix say why a drafter that was trained wasn't published."""


def spot_facts(records: Sequence[StepRecord], since: Account) -> dict[str, Any]:
    """Sums over the run. `since`: what happened after the last record.

    `slot_idle_s`: slot seconds without rollout work while a step was unfinished; `slot_idle_used_s`: of them, spent on
    drafter training, and `slot_idle_used_share` without the seconds in which a trainer had found that training doesn't
    pay; `slot_idle_unused_s`: the seconds in which no trainer held the slot, by reason. `yield_s_*`: from
    the order to give a slot back until a trainer had done so. `drafter_wait_s`: seconds in which the learner could
    have begun, had no drafter trainer held a slot; `drafter_wait_share` of the steps' time."""
    idle_s = fsum([*(r.slot_idle_s for r in records), since.idle_s])
    used_s = min(fsum([*(r.slot_idle_used_s for r in records), since.used_s]), idle_s)
    wait_s = fsum([*(r.drafter_wait_s for r in records), since.drafter_wait_s])
    step_s = fsum(r.step_s for r in records)
    yields = sorted([*(s for r in records for s in r.yield_seconds), *since.yield_seconds])
    counts = all_counts(records, since)
    unused = _add([*(r.slot_idle_unused_s for r in records), since.unused_s])
    by_slot = _add([*(r.slot_idle_by_slot for r in records), since.idle_by_slot])
    used_by_slot = _add([*(r.slot_idle_used_by_slot for r in records), since.used_by_slot])
    pays_s = idle_s - sum(seconds for reason, seconds in unused.items() if reason.startswith(RESTED))
    refused = {name.removeprefix(REFUSED): n for name, n in sorted(counts.items()) if name.startswith(REFUSED)}
    return {
        "slot_idle_s": idle_s,
        "slot_idle_used_s": used_s,
        "slot_idle_used_share": min(used_s / pays_s, 1.0) if pays_s > 0 else 0.0,
        "slot_idle_by_slot": {
            str(slot): {"idle_s": seconds, "used_s": min(used_by_slot.get(slot, 0.0), seconds)}
            for slot, seconds in sorted(by_slot.items())
        },
        "slot_idle_unused_s": dict(sorted(unused.items())),
        "yields": sum(r.yields for r in records) + since.yields,
        "yield_s_p50": nearest_rank(yields, 0.5),
        "yield_s_p99": nearest_rank(yields, 0.99),
        "yield_s_max": nearest_rank(yields, 1.0),
        "late_yields": counts["late_yields"],
        "drafter_wait_s": wait_s,
        "drafter_wait_share": wait_s / step_s if step_s else 0.0,
        "drafter_tokens_trained": sum(r.drafter_tokens_trained for r in records) + since.drafter_tokens,
        "drafter_versions_published": sum(r.drafter_versions for r in records) + since.drafter_versions,
        "drafter_versions_refused": refused,
        "drafter_rollbacks": counts["drafter_rolled_back"],
        "drafter_merges": {"tried": counts["drafter_merge_tried"], "better": counts["drafter_merge_better"]},
    }


def all_counts(records: Iterable[StepRecord], since: Account) -> Counter[str]:
    counts: Counter[str] = Counter()
    for some in [*(record.counts for record in records), since.counts]:
        counts.update(some)
    return counts


def _add(some: Iterable[Mapping[K, float]]) -> dict[K, float]:
    total: dict[K, float] = {}
    for amounts in some:
        for key, amount in amounts.items():
            total[key] = total.get(key, 0.0) + amount
    return total


def nearest_rank(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them don't exceed; 0 where there are none."""
    return ascending[max(ceil(share * len(ascending)), 1) - 1] if ascending else 0.0
