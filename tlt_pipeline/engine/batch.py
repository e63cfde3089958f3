"""The running answers of one slot, one row each, and what is kept a row: tokens, features, sampling, caches.

The invariant between two steps: the policy's cache and `features` hold positions 0 .. length-1, and the token at
position `length` is committed but not read yet. Rows are dense: a finished row is filled from the last one.
Shapes: B = running rows, R = rows at most, L = cache length, C = hidden size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from tlt_pipeline.engine.cache import KVCache, lazy_zeros
from tlt_pipeline.engine.sampling import RowSampling
from tlt_pipeline.messages import RolloutRequest
from tlt_pipeline.models.decoder import DecoderConfig


@dataclass
class Running:
    """One answer being written."""

    request: RolloutRequest
    prompt: list[int]
    started_at: float = field(default_factory=time.time)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    decode_steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafter_versions: list[int] = field(default_factory=list)
    streamed: int = 0
    """Positions whose features left already."""

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.tokens)


class Batch:
    def __init__(self, config: DecoderConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.cache = KVCache(config, rows, length, dtype, device)
        L = self.cache.length
        self.running: list[Running] = []
        self.lengths = np.zeros(rows, np.int64)
        self.seeds = np.zeros(rows, np.uint64)
        self.temperatures = np.ones(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float64)
        self.drafted_lengths = np.zeros(rows, np.int64)
        """Positions that the drafter's cache holds, a row."""
        self.tokens_RL = torch.zeros((rows, L), dtype=torch.int64, device=device)
        self.features_RLC = lazy_zeros((rows, L, config.hidden_size), dtype, device)
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
        self.drafted_lengths[row] = 0
        self.tokens_RL[row, : len(running.prompt)] = torch.tensor(running.prompt, device=self.device)
        self._sampling.clear()
        return row

    def remove(self, row: int) -> None:
        """Drops a row; the last one takes its place."""
        last = len(self.running) - 1
        if row != last:
            self.running[row] = self.running[last]
            for column in (
                self.lengths, self.seeds, self.temperatures, self.top_k, self.top_p, self.drafted_lengths
            ):  # fmt: skip
                column[row] = column[last]
            length = int(self.lengths[last])
            self.cache.move(last, row, length)
            if self.drafter_cache is not None:
                self.drafter_cache.move(last, row, int(self.drafted_lengths[last]))
            self.tokens_RL[row, : length + 1] = self.tokens_RL[last, : length + 1]
            self.features_RLC[row, :length] = self.features_RLC[last, :length]
        self.running.pop()
        self._sampling.clear()

    def copy_prompt(self, source: int, target: int) -> None:
        """A sibling has read the same prompt already: its keys, values and features are the same to the bit."""
        length = int(self.lengths[target])
        self.cache.move(source, target, length)
        self.features_RLC[target, :length] = self.features_RLC[source, :length]

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
