"""Shapes: N = rows, C = inputs, F = outputs."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x_NC: Tensor, weight_FC: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Summed in float32 (float64 for float64), rounded once -> [N, F] of x's dtype. Not batch-invariant: PyTorch
    chooses its blocks by the number of rows (the engine's `layout` pads them on a CPU)."""
    precise = torch.promote_types(x_NC.dtype, torch.float32)
    total_NF = x_NC.to(precise) @ weight_FC.to(precise).t()
    return (total_NF if bias_F is None else total_NF + bias_F).to(x_NC.dtype)
