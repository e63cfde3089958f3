"""Writes recorded answers again and compares the tokens: "lossless" as an equality (design 5.1).

Shapes: V = vocabulary, C = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tlt_pipeline.engine.cache import KVCache
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.forward import prefill_features
from tlt_pipeline.engine.noise import gumbel_noise, noise_keys
from tlt_pipeline.engine.sampling import filter_logits
from tlt_pipeline.messages import Completion, RolloutRequest


@dataclass(frozen=True)
class Recorded:
    request: RolloutRequest
    completion: Completion


@dataclass(frozen=True)
class Divergence:
    """Where a replayed answer parted from the recorded one. A token is -1 where that answer had ended; scores are
    logits / T + noise there (the higher one is drawn)."""

    request_id: str
    position: int
    recorded_token: int
    replayed_token: int
    recorded_score: float | None
    replayed_score: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay(engine: Engine, recorded: Sequence[Recorded]) -> list[Divergence]:
    """Decodes the recorded requests (all of the engine's policy version) -> those that came out different."""
    finished = decode_all(engine, [record.request for record in recorded])
    diverged: list[Divergence] = []
    for record, again in zip(recorded, finished, strict=True):
        before = record.completion.tokens.tolist()
        if before != again.tokens:
            diverged.append(_compare(engine, record.request, before, again.tokens))
    return diverged


def _compare(engine: Engine, request: RolloutRequest, before: list[int], after: list[int]) -> Divergence:
    shared = min(len(before), len(after))
    position = next((i for i in range(shared) if before[i] != after[i]), shared)
    tokens = [answer[position] if position < len(answer) else -1 for answer in (before, after)]
    scores = perturbed_scores(engine, request, before[:position])
    picked = [None if token < 0 else float(scores[token]) for token in tokens]
    return Divergence(request.request_id, position, tokens[0], tokens[1], picked[0], picked[1])


@torch.inference_mode()
def perturbed_scores(engine: Engine, request: RolloutRequest, answer: list[int]) -> torch.Tensor:
    """logits / T + noise of the token after `answer` [V], filters applied."""
    sequence = request.prompt.tolist() + answer
    weight = engine.policy.embed.weight
    cache = KVCache(engine.policy.config, 1, engine.layout.padded_length(len(sequence)), weight.dtype, weight.device)
    features_1TC = prefill_features(engine.forward, cache, [sequence], 0)
    last_PC = torch.nn.functional.pad(features_1TC[0, -1:], (0, 0, 0, engine.layout.linear.padded(1) - 1))
    temperature = request.sampling.temperature
    scaled_1V = engine.forward.logits(last_PC)[:1].float() / (temperature or 1.0)
    if request.sampling.top_k or request.sampling.top_p < 1:
        top_k, top_p = torch.tensor([request.sampling.top_k]), torch.tensor([request.sampling.top_p])
        scaled_1V = filter_logits(scaled_1V, top_k.to(weight.device), top_p.to(weight.device))
    if temperature == 0:
        return scaled_1V[0]
    keys = noise_keys(np.array([request.seed], np.uint64), np.array([len(sequence)], np.int64))
    return (scaled_1V + gumbel_noise(keys.to(weight.device), engine.hashes))[0]
