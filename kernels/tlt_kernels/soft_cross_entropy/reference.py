"""Shapes: N = rows, V = vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(scores_NV: Tensor, policy_NV: Tensor, weight_N: Tensor) -> Tensor:
    """weight × H(softmax(policy), softmax(scores)) of each row, in nats, float32 [N]; `scores` are replaced by what the
    weighted loss's slope in them is, weight × (softmax(scores) - softmax(policy)), in their own dtype.

    Both are scores, not probabilities; computed in float32 (float64 for float64). A token that the policy excludes
    (-inf) doesn't count, whatever the drafter's score is; one that only the drafter excludes costs infinitely much."""
    precise = torch.promote_types(scores_NV.dtype, torch.float32)
    scores, likely_NV = scores_NV.to(precise), policy_NV.to(precise).softmax(-1)
    weight_N1, normalizer_N1 = weight_N.to(precise).unsqueeze(1), scores.logsumexp(-1, keepdim=True)
    expected_N = torch.where(likely_NV > 0, likely_NV * scores, 0.0).sum(-1)
    scores_NV.copy_((scores - normalizer_N1).exp_().sub_(likely_NV).mul_(weight_N1))
    return ((normalizer_N1.squeeze(1) - expected_N) * weight_N1.squeeze(1)).float()
