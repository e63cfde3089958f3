"""Drafters: what the engine and the trainer know of them, and EAGLE's: one decoder layer on the policy's hidden states
(arXiv 2401.15077). EAGLE-3's is in eagle3.py.

EAGLE's reads pairs (embedding of token t+1, feature of token t), the feature being the policy's last hidden
state before its final norm, and predicts the feature of token t+1; the policy's own norm and LM head,
frozen, turn that into scores. The pairing is the same in training and in the engine (off by one halves
acceptance silently). Trainable: `fc`, `layer`. Frozen and never in its weight set: the policy's embedding,
final norm and LM head, of which it may use the rows of some tokens only (`draft_ids`). Shapes as in decoder.py;
v = draft vocabulary, F = numbers of a token's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_pipeline.models.decoder import (
    CausalAttention,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    Linear,
    Ops,
    RMSNorm,
    Rope,
)
from tlt_pipeline.models.drafter_config import layer_of

DrafterKind = Literal["eagle", "eagle3"]

PROBES = 2048
PROBE_WIDTH = 64
RIDGE = 0.01


class Drafter(nn.Module):
    """A token's features, as the policy's passes hand them out and drafter training gets them: the inputs of the
    layers `taps`, then the last hidden state before the final norm [N, F].

    A step reads the embedding of token t+1 and one hidden state of C numbers: `fuse` of the policy's features at t, or
    while drafting, from the second step on, what the step before gave."""

    kind: ClassVar[DrafterKind]
    taps: tuple[int, ...] = ()
    draft_ids: Tensor | None
    """Tokens that it may propose, ascending, int64 [v] (the "d2t" of EAGLE-3's formats); None: all."""
    fc: nn.Linear
    layer: DecoderLayer

    def __init__(self, config: DecoderConfig) -> None:
        """`config` is the policy's: the drafter has its dimensions, one layer, no biases, no q/k norm."""
        super().__init__()
        self.policy_config = config
        self.config = layer_of(config)

    @property
    def feature_size(self) -> int:
        """F."""
        return (len(self.taps) + 1) * self.config.hidden_size

    @property
    def owns_head(self) -> bool:
        """Its norm and head are weights of its own: so is the choice of tokens, which can't change then."""
        return False

    def fuse(self, features_NF: Tensor, linear: Linear = F.linear) -> Tensor:
        """The policy's features -> the hidden state that a step reads [N, C]."""
        raise NotImplementedError

    def draft_norm(self, norm: RMSNorm) -> RMSNorm:
        """What its hidden states go through before the head; `norm`: the policy's."""
        return norm

    def draft_head(self, head_VC: Tensor) -> Tensor:
        """The rows of its head, or of the policy's, one for each token that it may propose [v, C]."""
        return self.policy_rows(head_VC)

    def policy_rows(self, head_VC: Tensor) -> Tensor:
        """The rows of the policy's LM head for the tokens that it may propose [v, C]."""
        return head_VC if self.draft_ids is None else head_VC.detach().index_select(0, self.draft_ids)

    def forward(self, next_embedding: Tensor, hidden: Tensor, positions: Tensor, ops: Ops) -> Tensor:
        """next_embedding, hidden [N, C], positions [N] of the hidden state -> the predicted next one [N, C]."""
        raise NotImplementedError


class EagleDrafter(Drafter):
    kind = "eagle"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(self.config)
        self.rope = Rope(self.config)
        self.register_buffer("draft_ids", None)

    def fuse(self, features_NF: Tensor, linear: Linear = F.linear) -> Tensor:
        return features_NF

    def forward(self, next_embedding: Tensor, hidden: Tensor, positions: Tensor, ops: Ops) -> Tensor:
        cos, sin = self.rope.gather(positions, hidden.dtype)
        x = ops.linear(torch.cat([next_embedding, hidden], -1), self.fc.weight, None)
        return self.layer(x, cos, sin, 0, ops)


@torch.no_grad()
def drafter_from_policy(policy: Decoder, texts: Sequence[Tensor] = ()) -> EagleDrafter:
    """A start that already drafts: the policy's last layer, and an `fc` that was fitted (ridge regression) to give that
    layer's input for token t+1 from embedding t+1 and feature t, on `texts` (token ids [T] each, such as the policy
    writes; none: random tokens).

    Measured, expected tokens a pass of a chain of 4 at the start: SmolLM2 with random tokens 1.01, with 1,400 tokens of
    its own answers 1.49, with 3,500 1.64, with 13,000 1.78 (25,000 trained tokens reach that too, but with far fewer
    right at the second position and beyond). On a 6-layer policy of 1.3 M parameters, random tokens: `fc` as embedding
    plus feature 1.06, as the embedding alone, scaled to the features' size, 1.57, fitted 1.83. An earlier layer is
    sometimes better and sometimes worse."""
    drafter = EagleDrafter(policy.config)
    index = len(policy.layers) - 1
    for name, parameter in drafter.layer.named_parameters():
        parameter.copy_(policy.layers[index].get_parameter(name))
    drafter.fc.weight.copy_(_fit_inputs(policy, index, texts or random_texts(policy)))
    return drafter.to(device=policy.embed.weight.device, dtype=policy.embed.weight.dtype)


def random_texts(policy: Decoder) -> list[Tensor]:
    width = min(PROBE_WIDTH, policy.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(policy.config.vocab_size, (max(PROBES // width, 1), width), generator=generator))


def _fit_inputs(policy: Decoder, index: int, texts: Sequence[Tensor]) -> Tensor:
    """[C, 2C]: the linear map from (embedding of token t+1, feature of token t) to layer `index`'s input at t+1."""
    size, device = policy.config.hidden_size, policy.embed.weight.device
    square_PP = torch.zeros(2 * size, 2 * size, dtype=torch.float64, device=device)
    product_PC = torch.zeros(2 * size, size, dtype=torch.float64, device=device)
    count = 0
    for tokens_T in texts:
        pairs_NP, wanted_NC = _pairs(policy, index, tokens_T.to(device, torch.int64))
        square_PP += pairs_NP.T @ pairs_NP
        product_PC += pairs_NP.T @ wanted_NC
        count += len(pairs_NP)
    return solve_ridge(square_PP, product_PC, count)


def solve_ridge(square_PP: Tensor, product_PC: Tensor, count: int) -> Tensor:
    """Sums over `count` examples of x xᵀ (overwritten) and x yᵀ -> the linear map from x to y [C, P]."""
    scale_P = (square_PP.diagonal() / count).sqrt().clamp_min(1e-9)  # embeddings may be a hundred times smaller
    square_PP /= scale_P[:, None] * scale_P
    square_PP.diagonal().add_(RIDGE * count)
    solution_PC = torch.linalg.solve(square_PP, product_PC / scale_P[:, None])
    return (solution_PC / scale_P[:, None]).T


def _pairs(policy: Decoder, index: int, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """What `fc` reads [N, 2C] and what it should give [N, C], float64."""
    embeddings_1TC = inputs_1TC = hidden_1TC = policy.embed(tokens_T[None])
    cos, sin = policy.rope.gather(torch.arange(len(tokens_T), device=tokens_T.device)[None], hidden_1TC.dtype)
    for number, layer in enumerate(policy.layers):
        inputs_1TC = hidden_1TC if number == index else inputs_1TC
        hidden_1TC = layer(hidden_1TC, cos, sin, number, Ops(CausalAttention()))
    return torch.cat([embeddings_1TC[0, 1:], hidden_1TC[0, :-1]], -1).double(), inputs_1TC[0, 1:].double()
