"""The policy's draw at every row: Gumbel-max over temperature-scaled, filtered logits.

Shapes: N = rows, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters as columns, one row a position to draw."""

    inverse_temperature_N1: Tensor
    """1 / T; 1 where T is 0."""
    noise_scale_N1: Tensor
    """1; 0 where T is 0, which makes the draw greedy."""
    top_k_N: Tensor | None = None
    """int64; 0: off. None: no row filters."""
    top_p_N: Tensor | None = None


@dataclass(frozen=True)
class Draw:
    tokens_N: Tensor
    logprobs_N: Tensor
    """Under the distribution that was sampled from: temperature and filters applied."""
    policy_logprobs_N: Tensor
    """Under the unfiltered one at that temperature."""


def draw(logits_NV: Tensor, noise_NV: Tensor, sampling: RowSampling) -> Draw:
    """One token a row: argmax(logits / T + noise); the lowest id wins a tie. Computed in float32 (float64 for
    float64 logits)."""
    scaled_NV = _at_least_float32(logits_NV) * sampling.inverse_temperature_N1
    policy_normalizer_N = torch.logsumexp(scaled_NV, -1)
    normalizer_N, kept_NV = policy_normalizer_N, scaled_NV
    if sampling.top_k_N is not None and sampling.top_p_N is not None:
        kept_NV = filter_logits(scaled_NV, sampling.top_k_N, sampling.top_p_N)
        normalizer_N = torch.logsumexp(kept_NV, -1)
    tokens_N = perturbed(kept_NV, noise_NV, sampling.noise_scale_N1).argmax(-1)
    drawn_N = scaled_NV.gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1)
    return Draw(tokens_N, drawn_N - normalizer_N, drawn_N - policy_normalizer_N)


def perturbed(scaled_NV: Tensor, noise_NV: Tensor, noise_scale_N1: Tensor) -> Tensor:
    """logits / T + g [N, V]; its argmax is the draw. The drafter proposes by the same rule with its own logits."""
    return torch.addcmul(scaled_NV, noise_NV.to(scaled_NV.dtype), noise_scale_N1.to(scaled_NV.dtype))


def filter_logits(scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """-inf outside the top k, then outside the smallest set of at least top_p mass (the first token always stays).
    Ties at the border are decided by token id, so that the kept set has one size whatever computed it."""
    vocab = scaled_NV.shape[-1]
    sorted_NV, order_NV = torch.sort(scaled_NV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=scaled_NV.device)
    limit_N1 = torch.where(top_k_N > 0, top_k_N, vocab).unsqueeze(-1)
    sorted_NV = sorted_NV.masked_fill(rank_V >= limit_N1, float("-inf"))
    probability_NV = torch.softmax(sorted_NV, -1)
    before_NV = probability_NV.cumsum(-1) - probability_NV
    dropped_NV = (before_NV >= top_p_N.unsqueeze(-1)) & (rank_V > 0) & (top_p_N < 1).unsqueeze(-1)
    sorted_NV = sorted_NV.masked_fill(dropped_NV, float("-inf"))
    return torch.empty_like(scaled_NV).scatter_(-1, order_NV, sorted_NV)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
