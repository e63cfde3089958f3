"""Log-probabilities of answer tokens, and the backward pass through them, in bounded memory.

The scores over the vocabulary are the largest tensor of a training step (8,192 tokens × 49,152 entries × 4
bytes = 1.6 GB, several times over), yet they are needed at answer positions only, and only for a few rows at
once. So the decoder's features are computed once, and then row chunks go through the head one after another:
scores, loss and gradient with respect to the features, whereupon the scores are freed. Last, one backward
pass through the layers. Nothing is computed twice, and chunks are summed in a fixed order.

A = answer tokens of a micro-batch, R = those of a chunk, V = vocabulary, C = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tlt_pipeline.learner.batching import MicroBatch
from tlt_pipeline.models.decoder import CausalAttention, Decoder, Ops

CHUNK_SCORES = 1 << 24
"""Scores (rows × vocabulary) computed at a time: 64 MB in float32."""


@dataclass(frozen=True)
class Scoring:
    """How answers are scored. Weights stay float32; with `autocast` products are computed in bfloat16.
    `entropy`: off (zeros), a number, or a number with a gradient; each costs more than the one before."""

    device: torch.device
    autocast: bool = False
    temperature: float = 1.0
    entropy: Literal["off", "value", "gradient"] = "off"

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)


@dataclass(frozen=True)
class Scored:
    """Of each answer token [A], float32: its log-probability at the temperature, and the entropy of its
    distribution in nats."""

    logprobs_A: Tensor
    entropy_A: Tensor


LossOfRows = Callable[[Scored, slice], Tensor]
"""(scores of some rows, which answer tokens they are) -> their summed share of the loss, a scalar."""


def score_answers(model: Decoder, batch: MicroBatch, scoring: Scoring) -> Scored:
    """Without gradients."""
    with torch.no_grad():
        features_AC = _answer_features(model, batch, scoring)
        return _join([_score(model, features_AC, batch, rows, scoring) for rows in _chunks(model, batch)])


def backpropagate(model: Decoder, batch: MicroBatch, scoring: Scoring, loss: LossOfRows) -> tuple[float, Scored]:
    """Adds the gradient of the summed loss to the parameters' `.grad`; returns the loss and what was
    scored."""
    features_AC = _answer_features(model, batch, scoring)
    leaf_AC = features_AC.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=features_AC.device)
    parts: list[Scored] = []
    for rows in _chunks(model, batch):
        scored = _score(model, leaf_AC, batch, rows, scoring)
        share = loss(scored, rows)
        share.backward()
        total += share.detach()
        parts.append(Scored(scored.logprobs_A.detach(), scored.entropy_A.detach()))
    features_AC.backward(leaf_AC.grad)
    return float(total), _join(parts)


def _answer_features(model: Decoder, batch: MicroBatch, scoring: Scoring) -> Tensor:
    """Features at the positions that predict an answer token [A, C]."""
    B, T = batch.tokens_BT.shape
    positions_BT = torch.arange(T, device=batch.tokens_BT.device).expand(B, T)
    with scoring.precision():
        hidden_BTC = model.hidden(batch.tokens_BT, positions_BT, Ops(CausalAttention()))
    return hidden_BTC.flatten(0, 1).index_select(0, batch.predictors_A)


def _chunks(model: Decoder, batch: MicroBatch) -> list[slice]:
    answers = batch.targets_A.shape[0]
    rows = max(1, CHUNK_SCORES // model.config.vocab_size)
    return [slice(start, min(start + rows, answers)) for start in range(0, answers, rows)]


def _score(model: Decoder, features_AC: Tensor, batch: MicroBatch, rows: slice, scoring: Scoring) -> Scored:
    with scoring.precision():
        scores_RV = model.logits(features_AC[rows])
    logprobs_RV = torch.log_softmax(scores_RV.float() / scoring.temperature, -1)
    logprobs_R = logprobs_RV.gather(-1, batch.targets_A[rows].unsqueeze(-1)).squeeze(-1)
    if scoring.entropy == "off":
        return Scored(logprobs_R, torch.zeros_like(logprobs_R))
    with torch.set_grad_enabled(scoring.entropy == "gradient" and torch.is_grad_enabled()):
        entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1)
    return Scored(logprobs_R, entropy_R)


def _join(parts: list[Scored]) -> Scored:
    logprobs_A = torch.cat([part.logprobs_A for part in parts])
    return Scored(logprobs_A, torch.cat([part.entropy_A for part in parts]))
