"""What a training step measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from tlt_pipeline.learner.losses import TokenLoss
from tlt_pipeline.learner.scoring import Scored
from tlt_pipeline.messages import Completion


@dataclass(frozen=True)
class StepMetrics:
    """One RL step. Rewards, lengths and staleness: over all its completions. `loss`, `grad_norm`: means over
    its updates. `entropy` (nats) and `rollout_gap_*`: over the tokens trained on, before the step's first
    update where there is one update. `ratio`, `clip_fraction`, `kl`, `importance`: over these tokens in all
    updates.

    `rollout_gap_*`: |log-probability here - the rollout's| for tokens of the same version: how well learner
    and engine agree. `truncated`: share of answers cut at their length limit. `reward_errors`: answers whose
    verifier gave no verdict. `updates`: optimizer steps; 0 where every group was left out."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    kl: float
    ratio: float
    clip_fraction: float
    importance: float
    rollout_gap_mean: float
    rollout_gap_max: float
    groups: int
    zero_variance_groups: int
    reward_mean: float
    reward_std: float
    reward_errors: int
    response_length_mean: float
    response_length_max: int
    response_length_p99: float
    truncated: float
    staleness_mean: float
    staleness_max: int
    completions: int
    tokens_trained: int
    updates: int
    seconds: float
    tokens_per_s: float

    def as_floats(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


@dataclass
class Measured:
    """Sums over tokens, collected while a step trains; float64, so that millions of tokens add up."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    seen: int = 0
    ratio: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    importance: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    compared: int = 0
    gap: float = 0.0
    gap_max: float = 0.0

    def add_update(self, found: TokenLoss) -> None:
        self.seen += found.ratio_A.shape[0]
        self.ratio += _sum(found.ratio_A)
        self.clipped += _sum(found.clipped_A)
        self.kl += _sum(found.kl_A)
        self.importance += _sum(found.importance_A)

    def add_scored(self, scored: Scored, rollout: Sequence[Tensor], fresh: Sequence[bool]) -> None:
        """`rollout`: the rollout's log-probabilities, answer by answer; only fresh answers are compared."""
        self.tokens += scored.entropy_A.shape[0]
        self.entropy += _sum(scored.entropy_A)
        for own, theirs, comparable in zip(
            scored.logprobs_A.cpu().split([len(theirs) for theirs in rollout]), rollout, fresh, strict=True
        ):
            if comparable:
                gap = (own - theirs).abs()
                self.compared += len(gap)
                self.gap += _sum(gap)
                self.gap_max = max(self.gap_max, float(gap.max()))


def summarize(
    completions: Sequence[Completion],
    measured: Measured,
    left_out: int,
    version: int,
    seconds: float,
) -> StepMetrics:
    """`version`: of the policy that was trained; `left_out`: groups without gradient."""
    rewards = [completion.reward for completion in completions]
    lengths = [float(completion.tokens.length) for completion in completions]
    staleness = [float(version - completion.policy_version) for completion in completions]
    seen, tokens, compared = max(1, measured.seen), max(1, measured.tokens), max(1, measured.compared)
    return StepMetrics(
        loss=mean(measured.losses),
        grad_norm=mean(measured.norms),
        lr=measured.lr,
        entropy=measured.entropy / tokens,
        kl=measured.kl / seen,
        ratio=measured.ratio / seen if measured.seen else 1.0,
        clip_fraction=measured.clipped / seen,
        importance=measured.importance / seen if measured.seen else 1.0,
        rollout_gap_mean=measured.gap / compared,
        rollout_gap_max=measured.gap_max,
        groups=len({completion.group_id for completion in completions}),
        zero_variance_groups=left_out,
        reward_mean=mean(rewards),
        reward_std=standard_deviation(rewards),
        reward_errors=sum(completion.reward_error is not None for completion in completions),
        response_length_mean=mean(lengths),
        response_length_max=int(max(lengths, default=0)),
        response_length_p99=percentile(lengths, 0.99),
        truncated=mean([float(completion.finish_reason == "length") for completion in completions]),
        staleness_mean=mean(staleness),
        staleness_max=int(max(staleness, default=0)),
        completions=len(completions),
        tokens_trained=measured.tokens,
        updates=len(measured.losses),
        seconds=seconds,
        tokens_per_s=measured.tokens / seconds if seconds > 0 else 0.0,
    )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def standard_deviation(values: Sequence[float]) -> float:
    center = mean(values)
    return math.sqrt(mean([(value - center) ** 2 for value in values]))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))
