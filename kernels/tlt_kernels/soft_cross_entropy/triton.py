"""One program a row: a pass for both normalizers and the loss, and one that writes the slope over the scores.
Probabilities are never in memory. Shapes: N = rows, V = vocabulary."""

import torch
from torch import Tensor

from tlt_kernels.gateway import Launch, jit, tl

BLOCK, WARPS = 2048, 8
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@jit
def loss_kernel(scores, scores_stride, policy, policy_stride, weights, losses, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    scores += row * scores_stride
    policy += row * policy_stride
    # from finite maxima, exp(-inf - maximum) is 0 also where a whole block is masked
    top = tl.full((), _LOWEST, tl.float32)
    policy_top = tl.full((), _LOWEST, tl.float32)
    total, policy_total, expected = 0.0, 0.0, 0.0
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        own = tl.load(scores + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        its = tl.load(policy + ids, mask=ids < V, other=float("-inf")).to(tl.float32)

        new_top = tl.maximum(top, tl.max(own, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(own - new_top), 0)
        top = new_top

        new_policy_top = tl.maximum(policy_top, tl.max(its, 0))
        rescale = tl.exp(policy_top - new_policy_top)
        likely = tl.exp(its - new_policy_top)
        policy_total = policy_total * rescale + tl.sum(likely, 0)
        expected = expected * rescale + tl.sum(likely * tl.where(likely > 0, own, 0.0), 0)
        policy_top = new_policy_top
    tl.store(losses + row, (top + tl.log(total) - expected / policy_total) * weight)
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        own = tl.load(scores + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        its = tl.load(policy + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        slope = (tl.exp(own - top) / total - tl.exp(its - policy_top) / policy_total) * weight
        tl.store(scores + ids, slope.to(scores.dtype.element_ty), mask=ids < V)


def prepare(scores_NV: Tensor, policy_NV: Tensor, weight_N: Tensor) -> tuple[Launch, Tensor]:
    """Both float32, bfloat16 or float16, their rows contiguous."""
    assert scores_NV.stride(-1) == policy_NV.stride(-1) == 1, "rows must be contiguous"
    assert scores_NV.shape == policy_NV.shape
    N, V = scores_NV.shape
    losses_N = torch.empty(N, device=scores_NV.device)
    pointers = {
        "scores": scores_NV,
        "policy": policy_NV,
        "weights": weight_N.float().contiguous(),
        "losses": losses_N,
    }
    numbers = {"scores_stride": scores_NV.stride(0), "policy_stride": policy_NV.stride(0), "V": V}
    return Launch(loss_kernel, (N,), pointers | numbers, {"BLOCK": BLOCK}, WARPS), losses_N


def soft_cross_entropy(scores_NV: Tensor, policy_NV: Tensor, weight_N: Tensor) -> Tensor:
    launch, losses_N = prepare(scores_NV, policy_NV, weight_N)
    launch.run()
    return losses_N
