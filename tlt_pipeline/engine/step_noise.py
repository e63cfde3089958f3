"""The noise of a step's positions, and what is drawn with it: by Triton kernels that compute it where they use it, or
on a table of it. Which of both is decided once a step (`StepNoise`); the tokens are the same.

Shapes: B = running rows, E = positions a row, N = rows to draw at, V = vocabulary, K = siblings, W = nodes a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt_kernels import dispatch
from tlt_pipeline.engine import sampling
from tlt_pipeline.engine.noise import gumbel_noise
from tlt_pipeline.engine.proposals import Ints
from tlt_pipeline.engine.sampling import Draw, RowSampling


@dataclass(frozen=True)
class Noise:
    """Of N rows. `keys_N2`, `hashes_V`: what it is computed from (noise.py); `values_NV`: what that gives; None:
    kernels compute it."""

    keys_N2: Tensor
    hashes_V: Tensor
    values_NV: Tensor | None


class StepNoise:
    """The noise at E positions of each row."""

    def __init__(self, keys_BE2: Tensor, hashes_V: Tensor, kernels: bool) -> None:
        """`kernels`: leave it to them; the [B, E, V] table is never written."""
        self.keys_BE2, self.hashes_V = keys_BE2, hashes_V
        shape = (*keys_BE2.shape[:2], len(hashes_V))
        self.values_BEV = None if kernels else gumbel_noise(keys_BE2.flatten(0, 1), hashes_V).view(shape)

    def at(self, place: int, repeat: int = 1) -> Noise:
        """One position of each row, for `repeat` rows to draw each."""
        keys_B2 = self.keys_BE2[:, place]
        values_BV = None if self.values_BEV is None else self.values_BEV[:, place]
        if repeat > 1:
            keys_B2 = keys_B2.repeat_interleave(repeat, 0)
            values_BV = None if values_BV is None else values_BV.repeat_interleave(repeat, 0)
        return Noise(keys_B2, self.hashes_V, values_BV)

    def everywhere(self) -> Noise:
        """All positions, as B * E rows."""
        values_NV = None if self.values_BEV is None else self.values_BEV.flatten(0, 1)
        return Noise(self.keys_BE2.flatten(0, 1), self.hashes_V, values_NV)

    def nodes(self, depths_BW: Ints) -> Noise:
        """The positions at which a tree's nodes are drawn, as B * W rows: nodes of one depth share one."""
        B, E = self.keys_BE2.shape[:2]
        places_BW = depths_BW + np.arange(B)[:, None] * E
        places_N = torch.from_numpy(places_BW.reshape(-1)).to(self.keys_BE2.device)
        all_of_it = self.everywhere()
        values_NV = None if all_of_it.values_NV is None else all_of_it.values_NV.index_select(0, places_N)
        return Noise(all_of_it.keys_N2.index_select(0, places_N), self.hashes_V, values_NV)


def draw(logits_NV: Tensor, noise: Noise, row_sampling: RowSampling) -> Draw:
    """The policy's draw at every row; see `sampling.draw`."""
    if noise.values_NV is None:
        return dispatch.draw(logits_NV, noise.keys_N2, noise.hashes_V, row_sampling)
    return sampling.draw(logits_NV, noise.values_NV, row_sampling)
