"""AdamW over a decoder, learning-rate schedules, and the check that a gradient is finite."""

from __future__ import annotations

import math

import torch
from torch import nn


class NonFiniteUpdate(RuntimeError):
    """Loss or gradient is NaN or infinite; no weight was touched by this update."""


def make_optimizer(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter, arXiv 1711.05101); norms and biases are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, fused=True)


def warm_up(step: int, warmup_steps: int) -> float:
    """Share of the learning rate in update `step` (0-based): linear up to 1."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def cosine(step: int, steps: int, warmup_steps: int, floor: float) -> float:
    """Warm-up, then half a cosine from 1 down to `floor` at the last of `steps` updates."""
    if step < warmup_steps:
        return warm_up(step, warmup_steps)
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float, loss: float) -> float:
    """One clipped optimizer step; gradients are cleared. Returns the norm before clipping.

    Raises NonFiniteUpdate, before any weight moves, if loss or gradient isn't finite."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteUpdate(f"loss {loss}, gradient norm {norm}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
