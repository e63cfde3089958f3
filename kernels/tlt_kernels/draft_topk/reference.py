"""Shapes: N = rows, V = vocabulary, K = siblings."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_pipeline.engine.noise import gumbel_noise
from tlt_pipeline.engine.sampling import RowSampling, perturbed


def draft_topk(
    logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, sampling: RowSampling, k: int
) -> tuple[Tensor, Tensor]:
    """-> tokens int64 [N, K], best first, distinct, the lower id first among equals; scores [N, K], the log-softmax of
    the perturbed logits. Filters don't apply: a proposal that they exclude is not accepted."""
    precise = torch.promote_types(logits_NV.dtype, torch.float32)
    scaled_NV = logits_NV.to(precise) * sampling.inverse_temperature_N1
    perturbed_NV = perturbed(scaled_NV, gumbel_noise(keys_N2, hashes_V), sampling.noise_scale_N1)
    sorted_NV, order_NV = torch.sort(perturbed_NV, dim=-1, descending=True, stable=True)
    return order_NV[:, :k], sorted_NV[:, :k] - torch.logsumexp(perturbed_NV, -1, keepdim=True)
