"""The hidden states of every running answer: what a drafter reads, and what drafter training is fed with.

A ring a row, so that memory is bounded by what a drafter may look back at, not by the context.
Shapes: B = running rows, R = rows at most, L = ring length, W = positions a row, T = positions of one answer,
C = numbers of a token's features: the policy's hidden size, times four for EAGLE-3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_pipeline.engine.cache import lazy_zeros


class FeatureRing:
    def __init__(self, rows: int, length: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`length`: positions kept a row; `size`: C."""
        self.length = length
        self._data_RLC = lazy_zeros((rows, length, size), dtype, device)

    def write(self, first_row: int, positions_BW: Tensor, features_NC: Tensor) -> None:
        """features_NC [B * W, C] of consecutive rows; the positions of a row differ by less than the ring's length."""
        self._data_RLC.flatten(0, 1).index_copy_(0, self._slots(first_row, positions_BW).flatten(), features_NC)

    def gather(self, first_row: int, positions_BW: Tensor) -> Tensor:
        """[B * W, C]."""
        return self._data_RLC.flatten(0, 1).index_select(0, self._slots(first_row, positions_BW).flatten())

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of positions start .. end - 1 [T, C]."""
        assert 0 <= end - start <= self.length
        return self.gather(row, torch.arange(start, end, device=self._data_RLC.device)[None])

    def move(self, source: int, target: int, length: int) -> None:
        """`length`: positions that the source row has."""
        kept = min(length, self.length)
        self._data_RLC[target, :kept] = self._data_RLC[source, :kept]

    def _slots(self, first_row: int, positions_BW: Tensor) -> Tensor:
        rows_B = torch.arange(first_row, first_row + positions_BW.shape[0], device=positions_BW.device)
        return torch.add(positions_BW % self.length, rows_B.unsqueeze(1), alpha=self.length)
