"""What the kernel tests share: where kernels run here, inputs, and hashes that reach the noise's edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels import gateway
from tlt_pipeline.engine.noise import noise_keys, token_hashes
from tlt_pipeline.engine.sampling import RowSampling

INTERPRETER = pytest.param(
    "cpu", marks=pytest.mark.skipif(not gateway.INTERPRETED, reason="kernels are interpreted where there is no GPU")
)
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
on_every_device = pytest.mark.parametrize("device", [INTERPRETER, GPU])
"""The same cases through the interpreter and on a GPU; what is expected comes from the CPU."""

_POWERS = [2**p for p in (0, 1, 7, 8, 9, 15, 16, 23, 24, 25, 30)]
EDGES = np.array(
    [0, *_POWERS, *(-p for p in _POWERS), *(p - 1 for p in _POWERS), *(1 - p for p in _POWERS), 2**31 - 1, -(2**31)]
).astype(np.int32)


def hashes_for(x: NDArray[np.int32]) -> Tensor:
    """Token hashes that, with keys of zero, make the noise's integer equal x."""
    h = x.view(np.uint32) * np.uint32(pow(0x846CA68B, -1, 1 << 32))
    h ^= (h >> np.uint32(15)) ^ (h >> np.uint32(30))
    h *= np.uint32(pow(0x7FEB352D, -1, 1 << 32))
    h ^= h >> np.uint32(16)
    return torch.from_numpy(h.view(np.int32))


@dataclass(frozen=True)
class DrawCase:
    name: str
    rows: int = 4
    vocab: int = 3001
    dtype: torch.dtype = torch.float32
    scale: float = 3.0
    """Standard deviation of the logits."""
    levels: float = 0.0
    """> 0: logits are multiples of this, so that many are equal."""
    masked: bool = False
    """Half of the vocabulary at -inf, a whole block among it."""
    strided: bool = False
    """Rows are parts of longer ones."""
    temperatures: tuple[float, ...] = (1.0,)
    """Repeated over the rows, as the two below."""
    top_k: tuple[int, ...] | None = None
    top_p: tuple[float, ...] | None = None

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, RowSampling]:
        generator = torch.Generator().manual_seed(self.vocab)
        logits = torch.randn(self.rows, self.vocab + 13, generator=generator) * self.scale
        if self.levels:
            logits = (logits / self.levels).round() * self.levels
        if self.masked:
            logits[:, : self.vocab // 2] = float("-inf")
        logits = logits.to(self.dtype).to(device)[:, : self.vocab]
        ids = np.arange(self.rows)
        keys = noise_keys((ids + 11).astype(np.uint64), (ids * 3).astype(np.int64)).to(device)
        return (
            logits if self.strided else logits.contiguous(),
            keys,
            token_hashes(self.vocab, device),
            self._sampling(device),
        )

    def _sampling(self, device: str) -> RowSampling:
        temperature = self._over_rows(self.temperatures).unsqueeze(1)
        greedy = temperature == 0
        filters = [None if part is None else self._over_rows(part).to(device) for part in (self.top_k, self.top_p)]
        inverse = torch.where(greedy, 1.0, 1 / temperature).float()
        return RowSampling(inverse.to(device), (~greedy).float().to(device), *filters)

    def _over_rows(self, values: tuple[float, ...]) -> Tensor:
        return torch.tensor([values[row % len(values)] for row in range(self.rows)])


BF16 = torch.bfloat16
MIXED = (1.0, 0.6, 0.0, 1.7)
DRAWS = [
    DrawCase("plain", temperatures=MIXED),
    DrawCase("one token", vocab=1, rows=2),
    DrawCase("few tokens", vocab=7, rows=5, temperatures=MIXED),
    DrawCase("exactly one block", vocab=2048, rows=2),
    DrawCase("one more than a block", vocab=2049, rows=2, dtype=BF16),
    DrawCase("bfloat16", dtype=BF16, temperatures=MIXED),
    DrawCase("float16", dtype=torch.float16, temperatures=MIXED),
    DrawCase("saturated", scale=1e4, temperatures=MIXED),
    DrawCase("nearly flat", scale=1e-3, temperatures=MIXED),
    DrawCase("equal logits", levels=1.0, scale=1.0, temperatures=(0.0, 1.0)),
    DrawCase("masked logits", vocab=6000, masked=True, temperatures=MIXED),
    DrawCase("parts of longer rows", strided=True, dtype=BF16, temperatures=MIXED),
    DrawCase("large vocabulary", vocab=151_936, rows=1, dtype=BF16),
    DrawCase("top-k", temperatures=MIXED, top_k=(5, 0, 1, 50), top_p=(1.0,)),
    DrawCase("top-p", temperatures=MIXED, top_k=(0,), top_p=(0.9, 0.5, 1.0, 0.01)),
    DrawCase("both filters", temperatures=MIXED, dtype=BF16, top_k=(50, 3, 0, 3001), top_p=(0.8, 0.99, 0.3, 1.0)),
    DrawCase("filters among equals", rows=8, levels=1.0, scale=1.0, top_k=(3, 17, 100, 0), top_p=(1.0, 0.7, 0.999)),
    DrawCase("filters on masked logits", vocab=600, masked=True, top_k=(400, 20), top_p=(0.9, 1.0)),
    DrawCase("saturated filters", scale=1e4, top_k=(4, 0), top_p=(1.0, 0.9)),
    DrawCase("large vocabulary, filters", vocab=151_936, rows=1, dtype=BF16, top_k=(50,), top_p=(0.95,)),
]


def drawn_by_name(cases: list[DrawCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name.replace(" ", "-"))
