"""The running answers of one slot, one row each, and what is kept a row: tokens, features, sampling, caches.

The invariant between two steps: the policy's cache and the features hold positions 0 .. length-1, and the token at
position `length` is committed but not read yet. Rows are dense: a finished row is filled from the last one.
Shapes: B = running rows, R = rows at most, L = cache length.
"""

from __future__ import annotations

import numpy as np
import torch

from tlt_pipeline.engine.cache import KVCache
from tlt_pipeline.engine.features import FeatureRing
from tlt_pipeline.engine.running import Running
from tlt_pipeline.engine.sampling import RowSampling
from tlt_pipeline.models.decoder import DecoderConfig


class Batch:
    def __init__(
        self,
        config: DecoderConfig,
        rows: int,
        length: int,
        features: int,
        feature_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`length`: positions that a row may hold; `features`: of how many of them features are kept, of
        `feature_size` numbers each."""
        self.cache = KVCache(config, rows, length, dtype, device)
        L = self.cache.length
        self.running: list[Running] = []
        self.lengths = np.zeros(rows, np.int64)
        self.seeds = np.zeros(rows, np.uint64)
        self.temperatures = np.ones(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float64)
        self.drafted_lengths = np.zeros(rows, np.int64)
        """Positions up to which the drafter has read, a row."""
        self.drafted_starts = np.zeros(rows, np.int64)
        """Positions from which on it has: what came before was too far back when it was turned on."""
        self.tokens_RL = torch.zeros((rows, L), dtype=torch.int64, device=device)
        self.features = FeatureRing(rows, min(features, L), feature_size, dtype, device)
        self.drafter_cache: KVCache | None = None
        self.device, self.dtype = device, dtype
        self._sampling: dict[int, RowSampling] = {}

    def __len__(self) -> int:
        return len(self.running)

    def add(self, running: Running) -> int:
        """Takes the next row; the prompt's positions are to be filled by prefill."""
        row, sampling = len(self.running), running.request.sampling
        self.running.append(running)
        self.lengths[row] = len(running.prompt) - 1
        self.seeds[row] = running.request.seed
        self.temperatures[row] = sampling.temperature
        self.top_k[row], self.top_p[row] = sampling.top_k, sampling.top_p
        self.drafted_lengths[row] = self.drafted_starts[row] = 0
        self.tokens_RL[row, : len(running.prompt)] = torch.tensor(running.prompt, device=self.device)
        self._sampling.clear()
        return row

    def remove(self, row: int) -> None:
        """Drops a row; the last one takes its place."""
        last = len(self.running) - 1
        if row != last:
            self.running[row] = self.running[last]
            for column in (
                *(self.lengths, self.seeds, self.temperatures, self.top_k, self.top_p),
                *(self.drafted_lengths, self.drafted_starts),
            ):
                column[row] = column[last]
            length = int(self.lengths[last])
            self.cache.move(last, row, length)
            if self.drafter_cache is not None:
                self.drafter_cache.move(last, row, int(self.drafted_lengths[last]))
            self.tokens_RL[row, : length + 1] = self.tokens_RL[last, : length + 1]
            self.features.move(last, row, length)
        self.running.pop()
        self._sampling.clear()

    def copy_prompt(self, source: int, target: int) -> None:
        """A sibling has read the same prompt already: its keys, values and features are the same to the bit."""
        length = int(self.lengths[target])
        self.cache.move(source, target, length)
        self.features.move(source, target, length)

    def sampling(self, width: int) -> RowSampling:
        """Columns for B * width rows, in the order of flattened [B, width]."""
        if width not in self._sampling:
            self._sampling[width] = self._build_sampling(len(self.running), width)
        return self._sampling[width]

    def _build_sampling(self, B: int, width: int) -> RowSampling:
        temperature = np.repeat(self.temperatures[:B], width)
        greedy = temperature == 0
        inverse = torch.from_numpy(1.0 / np.where(greedy, 1.0, temperature)).to(self.device)
        number = torch.float64 if self.dtype == torch.float64 else torch.float32
        scale = torch.from_numpy(~greedy).to(self.device, number).unsqueeze(1)
        if not (self.top_k[:B].any() or (self.top_p[:B] < 1).any()):
            return RowSampling(inverse.to(number).unsqueeze(1), scale)
        top_k = torch.from_numpy(np.repeat(self.top_k[:B], width)).to(self.device)
        top_p = torch.from_numpy(np.repeat(self.top_p[:B], width)).to(self.device, number)
        return RowSampling(inverse.to(number).unsqueeze(1), scale, top_k, top_p)
