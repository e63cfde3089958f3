"""The fused loss and its slope: equal to the PyTorch reference, which equals autograd through the plain definition."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.kernel_cases import on_every_device
from tlt_kernels import dispatch

BF16 = torch.bfloat16


@dataclass(frozen=True)
class LossCase:
    name: str
    rows: int = 4
    vocab: int = 3001
    dtype: torch.dtype = torch.float32
    scale: float = 3.0
    """Standard deviation of the scores."""
    masked: bool = False
    """The policy excludes half of the vocabulary, a whole block among it; the drafter does so too in odd rows."""
    strided: bool = False
    """Rows are parts of longer ones."""

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.vocab)
        both = torch.randn(2, self.rows, self.vocab + 13, generator=generator) * self.scale
        if self.masked:
            both[1, :, : self.vocab // 2] = float("-inf")
            both[0, 1::2, : self.vocab // 2] = float("-inf")
        scores, policy = both.to(self.dtype).to(device)[:, :, : self.vocab]
        weight = torch.tensor([1.0, 0.0, 0.5, 2.0]).repeat(self.rows)[: self.rows].to(device)
        return (scores, policy, weight) if self.strided else (scores.contiguous(), policy.contiguous(), weight)


CASES = [
    LossCase("plain"),
    LossCase("one token", vocab=1, rows=2),
    LossCase("few tokens", vocab=7, rows=5),
    LossCase("exactly one block", vocab=2048, rows=2),
    LossCase("one more than a block", vocab=2049, rows=3, dtype=BF16),
    LossCase("bfloat16", dtype=BF16),
    LossCase("float16", dtype=torch.float16),
    LossCase("saturated", scale=1e4),
    LossCase("saturated bfloat16", scale=1e4, dtype=BF16),
    LossCase("nearly flat", scale=1e-3),
    LossCase("masked", vocab=6000, masked=True),
    LossCase("parts of longer rows", strided=True, dtype=BF16),
    LossCase("large vocabulary", vocab=151_936, rows=2, dtype=BF16),
    LossCase("large vocabulary, saturated", vocab=151_936, rows=1, scale=1e4),
]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))


@by_name
def test_the_reference_is_the_definition(case: LossCase) -> None:
    scores, policy, weight = case.inputs()
    wide = scores.double().requires_grad_()
    likely, logs = policy.double().softmax(-1), wide.log_softmax(-1)
    wanted = torch.where(likely > 0, -likely * logs.masked_fill(likely == 0, 0.0), 0.0).sum(-1) * weight
    (slope,) = torch.autograd.grad(wanted.sum(), wide)
    losses = dispatch.soft_cross_entropy(scores, policy, weight, path="reference")
    assert losses.dtype == torch.float32
    _assert_close(losses, wanted, scores, slope, case)


@on_every_device
@by_name
def test_the_kernel_is_the_reference(device: str, case: LossCase) -> None:
    slope, policy, weight = case.inputs()
    wanted = dispatch.soft_cross_entropy(slope, policy, weight, path="reference")
    scores, policy, weight = case.inputs(device)
    losses = dispatch.soft_cross_entropy(scores, policy, weight, path="triton")
    assert torch.isfinite(losses).all() and torch.isfinite(scores).all()
    _assert_close(losses.cpu(), wanted, scores.cpu(), slope, case)


@on_every_device
def test_what_lies_beside_the_rows_stays(device: str) -> None:
    case = LossCase("", strided=True)
    scores, policy, weight = case.inputs(device)
    whole = scores._base
    assert whole is not None
    before = whole.clone()
    dispatch.soft_cross_entropy(scores, policy, weight, path="triton")
    assert torch.equal(whole[..., case.vocab :], before[..., case.vocab :])
    assert torch.equal(whole[1], before[1])


def test_cross_entropy_of_pytorch_agrees() -> None:
    scores, policy, weight = LossCase("").inputs()
    wanted = F.cross_entropy(scores, policy.softmax(-1), reduction="none") * weight
    torch.testing.assert_close(dispatch.soft_cross_entropy(scores, policy, weight), wanted)


def _assert_close(losses: Tensor, wanted: Tensor, slopes: Tensor, wanted_slopes: Tensor, case: LossCase) -> None:
    # a normalizer as large as the scores is subtracted, and rounded there
    rounding = 4 * torch.finfo(torch.float32).eps * 5 * case.scale
    torch.testing.assert_close(losses.double(), wanted.double(), atol=1e-5 + rounding, rtol=1e-5)
    half = case.dtype != torch.float32
    tolerance = torch.finfo(case.dtype).eps if half else 1e-5 + rounding
    torch.testing.assert_close(slopes.double(), wanted_slopes.double(), atol=2 * tolerance, rtol=2 * tolerance)
