"""What a finished step is remembered by (a line of metrics.jsonl), and the summary made of those lines.

Means are computed with exact sums, so that they don't depend on the order in which answers arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, fsum
from typing import Any

from pydantic import BaseModel, ConfigDict

from tlt_pipeline.messages import Claim
from tlt_pipeline.scheduling.state import Account, Answer, Batch

CLAIMS: tuple[Claim, ...] = ("distribution", "float32", "exact")
"""From the weakest on: a run claims what holds for all of its answers."""
FIRST_AND_LAST = 3
"""`reward_first` is the mean over the first so many steps, `reward_last` over the last."""


class StepRecord(BaseModel):
    """One step. Seconds of wall clock; lengths in tokens. `slot_*` and what follows: since the record
    before."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    policy_version: int
    """Published at the end of the step."""
    rollout_version: int
    """The version that wrote the answers."""
    reward: float
    eval_reward: float | None = None
    """Greedy, on held-out prompts, with the policy before this step's update."""
    requests_admitted: int
    requests_trained: int
    requests_dead: int
    unverified: int
    """Answers whose verifier gave no verdict."""
    tokens: int
    tokens_per_s: float
    answer_length_mean: float
    answer_length_p50: int
    answer_length_p99: int
    answer_length_max: int
    answer_lengths: tuple[tuple[int, int], ...]
    """(length, how many answers), ascending."""
    acceptance_length: float
    drafts: int
    accepted: int
    rollout_s: float
    """Admission to the last completion."""
    yield_wait_s: float
    """From there until every slot was given back to the learner."""
    learner_s: float
    step_s: float
    """Admission, or the end of the step before if that is later, to the new policy version."""
    slot_idle_s: float
    slot_idle_used_s: float
    slot_idle_unused_s: Mapping[str, float] = {}
    drafter_tokens_trained: int = 0
    yields: int = 0
    yield_s: float = 0.0
    drafter_versions: int = 0
    """Published since the record before; `drafter_version` is the newest."""
    drafter_version: int = 0
    dead_letters: int = 0
    counts: Mapping[str, int] = {}
    learner: Mapping[str, float] = {}


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fsum(listed) / len(listed) if listed else 0.0


def acceptance_length(answers: Iterable[Answer]) -> float:
    """1 + accepted / drafts; 1 where nothing was drafted."""
    listed = list(answers)
    drafts = sum(answer.drafts for answer in listed)
    return 1.0 + sum(answer.accepted for answer in listed) / drafts if drafts else 1.0


def percentile(lengths: Mapping[int, int], share: float) -> int:
    """Nearest rank: the smallest length that at least `share` of the answers don't exceed. 0 without
    answers."""
    rank = max(1, ceil(share * sum(lengths.values())))
    for length in sorted(lengths):
        rank -= lengths[length]
        if rank <= 0:
            return length
    return 0


def answer_facts(answers: Sequence[Answer]) -> dict[str, Any]:
    """The fields of a record that follow from the answers alone."""
    lengths = Counter(answer.tokens for answer in answers)
    return {
        "reward": mean(answer.reward for answer in answers),
        "unverified": sum(not answer.verified for answer in answers),
        "tokens": sum(answer.tokens for answer in answers),
        "answer_length_mean": mean(answer.tokens for answer in answers),
        "answer_length_p50": percentile(lengths, 0.5),
        "answer_length_p99": percentile(lengths, 0.99),
        "answer_length_max": max(lengths, default=0),
        "answer_lengths": tuple(sorted(lengths.items())),
        "acceptance_length": acceptance_length(answers),
        "drafts": sum(answer.drafts for answer in answers),
        "accepted": sum(answer.accepted for answer in answers),
    }


def account_facts(account: Account) -> dict[str, Any]:
    return {
        "slot_idle_s": account.idle_s,
        "slot_idle_used_s": account.used_s,
        "slot_idle_unused_s": dict(account.unused_s),
        "drafter_tokens_trained": account.drafter_tokens,
        "yields": account.yields,
        "yield_s": account.yield_s,
        "drafter_versions": account.drafter_versions,
        "dead_letters": account.dead_letters,
        "counts": dict(account.counts),
    }


def rebuild_record(batch: Batch) -> StepRecord:
    """Of a step whose line was lost in a crash, from its answers; times are unknown and 0."""
    return StepRecord(
        step=batch.step,
        policy_version=batch.step + 1,
        rollout_version=batch.policy_version,
        requests_admitted=batch.size,
        requests_trained=len(batch.answers),
        requests_dead=batch.size - len(batch.answers),
        tokens_per_s=0.0,
        rollout_s=0.0,
        yield_wait_s=0.0,
        learner_s=0.0,
        step_s=0.0,
        **answer_facts(list(batch.answers.values())),
        **account_facts(Account(counts={"record_rebuilt": 1})),
    )


def summarise(records: Sequence[StepRecord], since: Account, evals: Mapping[int, float]) -> dict[str, Any]:
    """What summary.json holds. `since`: what happened after the last record; `evals`: evaluations without a
    record.

    `rollout_s`, `learner_s`, `step_s` and the slot times are sums over the run."""
    rewards = [record.reward for record in records]
    accepted = [record.acceptance_length for record in records]
    scores = {r.step: r.eval_reward for r in records if r.eval_reward is not None} | dict(evals)
    idle_s = fsum([*(r.slot_idle_s for r in records), since.idle_s])
    used_s = fsum([*(r.slot_idle_used_s for r in records), since.used_s])
    lengths: Counter[int] = Counter()
    for record in records:
        lengths.update(dict(record.answer_lengths))
    return {
        "steps": len(records),
        "reward_first": mean(rewards[:FIRST_AND_LAST]),
        "reward_last": mean(rewards[-FIRST_AND_LAST:]),
        "reward_by_step": rewards,
        "policy_version": records[-1].policy_version if records else 0,
        "drafter_versions_published": sum(r.drafter_versions for r in records) + since.drafter_versions,
        "acceptance_length_first": mean(accepted[:FIRST_AND_LAST]),
        "acceptance_length_last": mean(accepted[-FIRST_AND_LAST:]),
        "rollout_s": fsum(r.rollout_s for r in records),
        "learner_s": fsum(r.learner_s for r in records),
        "step_s": fsum(r.step_s for r in records),
        "slot_idle_s": idle_s,
        "slot_idle_used_s": min(used_s, idle_s),
        "requests_admitted": sum(r.requests_admitted for r in records),
        "requests_trained": sum(r.requests_trained for r in records),
        "dead_letters": sum(r.dead_letters for r in records) + since.dead_letters,
        "answer_length_p50": percentile(lengths, 0.5),
        "answer_length_p99": percentile(lengths, 0.99),
        **_by_step(records),
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
    """What the issue's list doesn't name: why idle time wasn't used, what was skipped, how slots were
    given back."""
    unused: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for facts in [*map(StepRecord.model_dump, records), account_facts(since)]:
        for reason, seconds in facts["slot_idle_unused_s"].items():
            unused[reason] += seconds
        counts.update(facts["counts"])
    yields = sum(r.yields for r in records) + since.yields
    claims = [claim for claim in CLAIMS if counts[f"answers_{claim}"]]
    yield_s = fsum([*(r.yield_s for r in records), since.yield_s])
    return {
        "claim": claims[0] if claims else None,
        "slot_idle_unused_s": dict(sorted(unused.items())),
        "drafter_tokens_trained": sum(r.drafter_tokens_trained for r in records) + since.drafter_tokens,
        "yields": yields,
        "yield_s_mean": yield_s / yields if yields else 0.0,
        "unverified": sum(r.unverified for r in records),
        "counts": dict(sorted(counts.items())),
    }
