"""Waiting requests become rows: their prompts are read, once for all siblings of a group.

Shapes: B = rows, W = prompt positions, C = hidden size.
"""

from __future__ import annotations

from collections import deque

import torch

from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.forward import Forward, prefill_features
from tlt_pipeline.engine.ngram import NgramIndex
from tlt_pipeline.engine.running import Running
from tlt_pipeline.engine.streaming import FeatureStream
from tlt_pipeline.messages import RolloutRequest

Prompt = tuple[int, ...]


class Admission:
    def __init__(self, forward: Forward, ngrams: NgramIndex | None, stream: FeatureStream) -> None:
        self.forward, self.ngrams, self.stream = forward, ngrams, stream

    def fill(self, batch: Batch, waiting: deque[RolloutRequest], room: int) -> None:
        """Takes up to `room` requests from `waiting`."""
        donors = {tuple(running.prompt): row for row, running in enumerate(batch.running)}
        arriving = [waiting.popleft() for _ in range(min(len(waiting), room))]
        # rows to prefill must be consecutive: first those with a prompt nobody has read
        fresh: dict[Prompt, RolloutRequest] = {}
        siblings: list[tuple[Prompt, RolloutRequest]] = []
        for request in arriving:
            prompt = tuple(request.prompt.tolist())
            if prompt in donors or prompt in fresh:
                siblings.append((prompt, request))
            else:
                fresh[prompt] = request
        first = len(batch)
        for prompt, request in fresh.items():
            donors[prompt] = batch.add(self._start(prompt, request))
        if fresh:
            self._prefill(batch, first)
        for prompt, request in siblings:
            row = batch.add(self._start(prompt, request))
            batch.copy_prompt(donors[prompt], row)
            self.stream.skip(batch, row)

    def _start(self, prompt: Prompt, request: RolloutRequest) -> Running:
        return Running(request, list(prompt), None if self.ngrams is None else self.ngrams.open(prompt))

    def _prefill(self, batch: Batch, first: int) -> None:
        """Reads all but the last token of each prompt; the last one is read by the first decode step."""
        read = [running.prompt[:-1] for running in batch.running[first:]]
        features_BWC = prefill_features(self.forward, batch.cache, read, first)
        width, ring = features_BWC.shape[1], batch.features
        if width <= ring.length:
            positions_W = torch.arange(width, device=batch.device)
            ring.write(first, positions_W.expand(len(read), -1), features_BWC.flatten(0, 1))
            return
        for row, tokens in enumerate(read, start=first):
            features_WC = features_BWC[row - first, : len(tokens)]
            self.stream.prompt(batch, row, features_WC)
            kept_W = torch.arange(max(len(tokens) - ring.length, 0), len(tokens), device=batch.device)
            ring.write(row, kept_W[None], features_WC[kept_W])
