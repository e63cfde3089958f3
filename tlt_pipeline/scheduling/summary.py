"""summary.json: what a finished run was, made of the records of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from tlt_pipeline.messages import Claim
from tlt_pipeline.scheduling.records import StepRecord, mean, percentile
from tlt_pipeline.scheduling.spot import all_counts, spot_facts
from tlt_pipeline.scheduling.state import Account

CLAIMS: tuple[Claim, ...] = ("distribution", "float32", "exact")
"""From the weakest on: a run claims what holds for all of its answers."""
FIRST_AND_LAST = 3
"""`reward_first` is the mean over the first so many steps, `reward_last` over the last."""


def summarise(records: Sequence[StepRecord], since: Account, evals: Mapping[int, float]) -> dict[str, Any]:
    """What summary.json holds. `since`: what happened after the last record; `evals`: evaluations without a
    record.

    `rollout_s`, `learner_s`, `step_s` and the slot times are sums over the run."""
    rewards = [record.reward for record in records]
    accepted = [record.acceptance_length for record in records]
    scores = {r.step: r.eval_reward for r in records if r.eval_reward is not None} | dict(evals)
    lengths: Counter[int] = Counter()
    for record in records:
        lengths.update(dict(record.answer_lengths))
    return {
        "steps": len(records),
        "reward_first": mean(rewards[:FIRST_AND_LAST]),
        "reward_last": mean(rewards[-FIRST_AND_LAST:]),
        "reward_by_step": rewards,
        "policy_version": records[-1].policy_version if records else 0,
        "acceptance_length_first": mean(accepted[:FIRST_AND_LAST]),
        "acceptance_length_last": mean(accepted[-FIRST_AND_LAST:]),
        "rollout_s": fsum(r.rollout_s for r in records),
        "learner_s": fsum(r.learner_s for r in records),
        "step_s": fsum(r.step_s for r in records),
        "requests_admitted": sum(r.requests_admitted for r in records),
        "requests_trained": sum(r.requests_trained for r in records),
        "dead_letters": sum(r.dead_letters for r in records) + since.dead_letters,
        "answer_length_p50": percentile(lengths, 0.5),
        "answer_length_p99": percentile(lengths, 0.99),
        **_by_step(records),
        **spot_facts(records, since),
        **_sums(records, since),
        "eval_reward_by_version": {str(version): score for version, score in sorted(scores.items())},
    }


def _by_step(records: Sequence[StepRecord]) -> dict[str, Any]:
    names = (
        "acceptance_length",
        "rollout_s",
        "yield_wait_s",
        "learner_s",
        "step_s",
        "tokens_per_s",
        "tokens",
    )
    names = (*names, "answer_length_p50", "answer_length_p99", "drafter_version")
    return {f"{name}_by_step": [getattr(record, name) for record in records] for name in names}


def _sums(records: Sequence[StepRecord], since: Account) -> dict[str, Any]:
    counts = all_counts(records, since)
    claims = [claim for claim in CLAIMS if counts[f"answers_{claim}"]]
    return {
        "claim": claims[0] if claims else None,
        "unverified": sum(r.unverified for r in records),
        "counts": dict(sorted(counts.items())),
    }
