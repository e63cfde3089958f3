"""Log-probabilities of answer tokens, and the backward pass through them, in bounded memory.

The scores over the vocabulary are the largest tensor of a training step (8,192 tokens × 49,152 entries × 4
bytes = 1.6 GB, several times over), yet they are needed at answer positions only, and only for a few rows at
once. So the decoder's features are computed once, and then row chunks go through the head one after another:
scores, loss and gradient with respect to the features, whereupon the scores are freed. Last, one backward
pass through the layers. Nothing is computed twice, and chunks are summed in a fixed order.

A = answer tokens of a micro-batch, V = vocabulary, C = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_pipeline.learner.batching import MicroBatch
from tlt_pipeline.models.decoder import CausalAttention, Decoder, Ops

CHUNK_SCORES = 1 << 24
"""Scores (rows × vocabulary) computed at a time: 64 MB in float32."""


@dataclass(frozen=True)
class Scored:
    """Of each answer token [A]: its log-probability at the temperature, and the entropy of its
    distribution."""

    logprobs_A: Tensor
    entropy_A: Tensor


LossOfRows = Callable[[Scored, slice], Tensor]
"""(scores of some rows, which answer tokens they are) -> their summed share of the loss, a scalar."""


@dataclass(frozen=True)
class Precision:
    """Where and how the decoder computes. Weights stay float32; bfloat16 is autocast's choice of
    operations."""

    device: torch.device
    autocast: bool = False

    def context(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)


def score_answers(model: Decoder, batch: MicroBatch, temperature: float, precision: Precision) -> Scored:
    """Log-probabilities and entropies [A], float32, without gradients."""
    with torch.no_grad():
        features_AC = _answer_features(model, batch, precision)
        parts = [
            _score(model, features_AC[rows], batch.targets_A[rows], temperature, precision)
            for rows in _chunks(model, batch)
        ]
    return _join(parts)


def backpropagate(
    model: Decoder, batch: MicroBatch, temperature: float, precision: Precision, loss: LossOfRows
) -> tuple[float, Scored]:
    """Adds the gradient of the summed loss to the parameters' `.grad`; returns the loss and what was
    scored."""
    features_AC = _answer_features(model, batch, precision)
    leaf_AC = features_AC.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=features_AC.device)
    parts: list[Scored] = []
    for rows in _chunks(model, batch):
        scored = _score(model, leaf_AC[rows], batch.targets_A[rows], temperature, precision)
        share = loss(scored, rows)
        share.backward()
        total += share.detach()
        parts.append(Scored(scored.logprobs_A.detach(), scored.entropy_A.detach()))
    features_AC.backward(leaf_AC.grad)
    return float(total), _join(parts)


def _join(parts: list[Scored]) -> Scored:
    logprobs_A = torch.cat([part.logprobs_A for part in parts])
    return Scored(logprobs_A, torch.cat([part.entropy_A for part in parts]))


def _answer_features(model: Decoder, batch: MicroBatch, precision: Precision) -> Tensor:
    """Features at the positions that predict an answer token [A, C]."""
    B, T = batch.tokens_BT.shape
    positions_BT = torch.arange(T, device=batch.tokens_BT.device).expand(B, T)
    with precision.context():
        hidden_BTC = model.hidden(batch.tokens_BT, positions_BT, Ops(CausalAttention()))
    return hidden_BTC.flatten(0, 1).index_select(0, batch.predictors_A)


def _chunks(model: Decoder, batch: MicroBatch) -> list[slice]:
    answers = batch.targets_A.shape[0]
    rows = max(1, CHUNK_SCORES // model.config.vocab_size)
    return [slice(start, min(start + rows, answers)) for start in range(0, answers, rows)]


def _score(
    model: Decoder, features_RC: Tensor, targets_R: Tensor, temperature: float, precision: Precision
) -> Scored:
    with precision.context():
        scores_RV = model.logits(features_RC)
    scaled_RV = scores_RV.float() / temperature
    log_total_R = torch.logsumexp(scaled_RV, -1)
    drawn_R = scaled_RV.gather(-1, targets_R.unsqueeze(-1)).squeeze(-1)
    expected_R = (torch.softmax(scaled_RV, -1) * scaled_RV).sum(-1)
    return Scored(drawn_R - log_total_R, log_total_R - expected_R)
