"""The policy-gradient objective, token by token. Pure functions of tensors; A = answer tokens.

Per token (PPO's clipped surrogate, arXiv 1707.06347, with GRPO's advantage, arXiv 2402.03300, eq. 3):

    ratio = exp(logprob - old)
    loss  = -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A) · importance
            + kl_coef · k3 - entropy_coef · entropy

clip_high > clip_low is DAPO's "clip-higher" (arXiv 2503.14476, section 3.1). Tokens are averaged either over
all answer tokens at once (`token`; DAPO, section 3.3) or within each answer first and then over answers
(`sequence`; GRPO as published, under which a token of a long answer weighs less).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are cut here before exp: e^20 is far beyond every clip, and inf times 0 would be NaN."""


@dataclass(frozen=True)
class Objective:
    clip_low: float
    clip_high: float
    kl_coef: float
    entropy_coef: float
    tis_cap: float


@dataclass(frozen=True)
class TokenData:
    """What the objective needs to know of each answer token, all [A] and without gradient.

    `old_A`: log-probability under the old policy, but where `own_A` is true it is the current one itself (the
    first update on answers of this very policy: the ratio is 1 and its gradient that of the log-probability).
    `sampled_A`: under the distribution that the token was drawn from. `weights_A`: its share of the mean.
    `reference_A`: under the reference policy; None without KL."""

    old_A: Tensor
    own_A: Tensor
    sampled_A: Tensor
    advantages_A: Tensor
    weights_A: Tensor
    reference_A: Tensor | None

    def __getitem__(self, rows: slice) -> TokenData:
        return TokenData(
            self.old_A[rows],
            self.own_A[rows],
            self.sampled_A[rows],
            self.advantages_A[rows],
            self.weights_A[rows],
            None if self.reference_A is None else self.reference_A[rows],
        )


@dataclass(frozen=True)
class TokenLoss:
    """All [A]; only `loss_A` carries a gradient. `clipped_A`: where the clip took the gradient away."""

    loss_A: Tensor
    ratio_A: Tensor
    clipped_A: Tensor
    importance_A: Tensor
    kl_A: Tensor


def policy_loss(logprobs_A: Tensor, entropy_A: Tensor, data: TokenData, objective: Objective) -> TokenLoss:
    """Loss of each token, before averaging (`data.weights_A` isn't applied)."""
    old_A = torch.where(data.own_A, logprobs_A.detach(), data.old_A)
    importance_A = truncated_importance(old_A, data.sampled_A, objective.tis_cap)
    ratio_A = _log_ratio(logprobs_A, old_A).exp()
    bounded_A = ratio_A.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    gain_A, bounded_gain_A = ratio_A * data.advantages_A, bounded_A * data.advantages_A
    loss_A = -torch.minimum(gain_A, bounded_gain_A) * importance_A
    kl_A = torch.zeros_like(logprobs_A)
    if data.reference_A is not None:
        kl_A = k3(logprobs_A, data.reference_A)
        loss_A = loss_A + objective.kl_coef * kl_A
    if objective.entropy_coef != 0:
        loss_A = loss_A - objective.entropy_coef * entropy_A
    clipped_A = (bounded_gain_A < gain_A).detach()
    return TokenLoss(loss_A, ratio_A.detach(), clipped_A, importance_A, kl_A.detach())


def k3(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy ‖ reference) from tokens drawn by the policy, never negative: with
    x = log(reference / policy), e^x - x - 1 (Schulman 2020, "Approximating KL divergence"; GRPO eq. 4)."""
    x_A = _log_ratio(reference_A, logprobs_A)
    return x_A.exp() - x_A - 1


def truncated_importance(old_A: Tensor, sampled_A: Tensor, cap: float) -> Tensor:
    """min(old policy / distribution that the tokens were drawn from, cap), per token: corrects for answers
    from another version, precision or a filtered distribution, with bounded variance (Ionides 2008,
    "Truncated importance sampling"; in PPO with actors that lag, IMPALA's ρ̄, arXiv 1802.01561). Cap 0: no
    correction, all 1."""
    if cap == 0:
        return torch.ones_like(old_A)
    return _log_ratio(old_A, sampled_A).exp().clamp(max=cap)


def answer_weights(lengths: list[int], level: Literal["token", "sequence"]) -> list[float]:
    """Weight of a token of each answer in the mean over the answers of one optimizer step."""
    if level == "token":
        return [1 / sum(lengths)] * len(lengths)
    return [1 / (len(lengths) * length) for length in lengths]


def _log_ratio(logprobs_A: Tensor, base_A: Tensor) -> Tensor:
    return (logprobs_A - base_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
