"""What a finished step is remembered by: a line of metrics.jsonl.

Means are computed with exact sums, so that they don't depend on the order in which answers arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, fsum
from typing import Any

from pydantic import BaseModel, ConfigDict

from tlt_pipeline.scheduling.state import Account, Answer, Batch


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
    slot_idle_by_slot: Mapping[int, float] = {}
    slot_idle_used_by_slot: Mapping[int, float] = {}
    slot_idle_unused_s: Mapping[str, float] = {}
    drafter_tokens_trained: int = 0
    yields: int = 0
    yield_seconds: tuple[float, ...] = ()
    """From each order to give a slot back until a trainer had done so."""
    drafter_wait_s: float = 0.0
    """Share of `yield_wait_s` in which a drafter trainer still held a slot."""
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
        "slot_idle_by_slot": dict(account.idle_by_slot),
        "slot_idle_used_by_slot": dict(account.used_by_slot),
        "slot_idle_unused_s": dict(account.unused_s),
        "drafter_tokens_trained": account.drafter_tokens,
        "yields": account.yields,
        "yield_seconds": account.yield_seconds,
        "drafter_wait_s": account.drafter_wait_s,
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
