"""Features of finished answers, computed once more by the policy itself: vLLM doesn't hand its hidden states out (its
extraction takes the place of speculation).

Shapes: T = positions of an answer with its prompt, C = hidden size.
"""

from __future__ import annotations

import torch

from tlt_pipeline.engine.results import FeaturePiece
from tlt_pipeline.messages import RolloutRequest
from tlt_pipeline.models.decoder import CausalAttention, Decoder, Ops


@torch.inference_mode()
def recompute(policy: Decoder, request: RolloutRequest, answer: list[int]) -> FeaturePiece:
    """The whole answer as one piece: every position but the last, which predicts nothing."""
    prompt = request.prompt.tolist()
    tokens_T = torch.tensor([*prompt, *answer][:-1])
    device = policy.embed.weight.device
    positions_T = torch.arange(len(tokens_T), device=device)
    features_1TC = policy.hidden(tokens_T.to(device)[None], positions_T[None], Ops(CausalAttention()))
    return FeaturePiece(request, 0, tokens_T, features_1TC[0].cpu(), len(prompt))
