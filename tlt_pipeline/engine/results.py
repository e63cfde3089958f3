"""What leaves the engine: finished answers, and features for drafter training. T = tokens, C = hidden size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tlt_pipeline.messages import DraftStats, FinishReason, RolloutRequest


@dataclass(frozen=True)
class Finished:
    """A finished answer. tokens, logprobs, policy_logprobs: [answer tokens], as in messages.Completion."""

    request: RolloutRequest
    tokens: list[int]
    logprobs: list[float]
    policy_logprobs: list[float]
    reason: FinishReason
    draft: DraftStats
    started_at: float


@dataclass(frozen=True)
class FeaturePiece:
    """A contiguous piece of one answer for drafter training: tokens and features at positions start ..,
    `answer_from`: the first position in the piece that belongs to the answer."""

    request: RolloutRequest
    start: int
    tokens_T: Tensor
    features_TC: Tensor
    answer_from: int
    rejections: int = 0
    """Verify passes in it that ended at a wrong proposal."""
