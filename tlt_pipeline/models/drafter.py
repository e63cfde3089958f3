"""The EAGLE drafter: one decoder layer on the policy's hidden states (EAGLE, arXiv 2401.15077).

It reads pairs (embedding of token t+1, feature of token t), the feature being the policy's last hidden
state before its final norm, and predicts the feature of token t+1; the policy's own norm and LM head,
frozen, turn that into scores. The pairing is the same in training and in the engine (off by one halves
acceptance silently). Trainable: `fc`, `layer`. Frozen and never in its weight set: the policy's embedding,
final norm and LM head. Shapes as in decoder.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tlt_pipeline.models.decoder import CausalAttention, Decoder, DecoderConfig, DecoderLayer, Ops, Rope

PROBES = 2048
PROBE_WIDTH = 64
RIDGE = 0.01


class EagleDrafter(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        """`config` is the policy's: the drafter has its dimensions, one layer, no biases, no q/k norm."""
        super().__init__()
        self.config = replace(config, num_layers=1, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(self.config)
        self.rope = Rope(self.config)

    def forward(self, next_embedding: Tensor, hidden: Tensor, positions: Tensor, ops: Ops) -> Tensor:
        """next_embedding, hidden [N, C], positions [N] of the feature -> predicted next feature [N, C]."""
        cos, sin = self.rope.gather(positions, hidden.dtype)
        x = ops.linear(torch.cat([next_embedding, hidden], -1), self.fc.weight, None)
        return self.layer(x, cos, sin, 0, ops)


def drafter_from_policy(policy: Decoder, probes: int = PROBES) -> EagleDrafter:
    """A start that already drafts a little, without any data: the policy's last layer, and an `fc` that was fitted
    (ridge regression) to give that layer's input for token t+1 from embedding t+1 and feature t, on `probes` random
    tokens that the policy reads.

    Measured on a 6-layer policy of 1.3 M parameters, expected tokens a pass of a chain of 4 at the start, after 2 s
    and after 5 s of training: `fc` as embedding plus feature 1.06, 1.79, 2.12; as the embedding alone, scaled to the
    features' size, 1.57, 2.86, 3.27; fitted 1.83, 2.70, 3.36. An earlier layer is sometimes better and sometimes worse
    (the last but one: 1.90, 3.43, 3.78 there, but 1.28, 2.21, 2.49 against 1.22, 2.69, 2.86 on an 8-layer one)."""
    drafter = EagleDrafter(policy.config)
    index = len(policy.layers) - 1
    with torch.no_grad():
        for name, parameter in drafter.layer.named_parameters():
            parameter.copy_(policy.layers[index].get_parameter(name))
        drafter.fc.weight.copy_(_fit_inputs(policy, index, probes))
    return drafter.to(device=policy.embed.weight.device, dtype=policy.embed.weight.dtype)


def _fit_inputs(policy: Decoder, index: int, probes: int) -> Tensor:
    """[C, 2C]: the linear map from (embedding of token t+1, feature of token t) to layer `index`'s input at t+1."""
    config, device = policy.config, policy.embed.weight.device
    width = min(PROBE_WIDTH, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(config.vocab_size, (max(probes // width, 1), width), generator=generator).to(device)
    positions_BT = torch.arange(width, device=device).expand_as(tokens_BT)
    embeddings_BTC = inputs_BTC = hidden_BTC = policy.embed(tokens_BT)
    cos, sin = policy.rope.gather(positions_BT, hidden_BTC.dtype)
    for number, layer in enumerate(policy.layers):
        inputs_BTC = hidden_BTC if number == index else inputs_BTC
        hidden_BTC = layer(hidden_BTC, cos, sin, number, Ops(CausalAttention()))
    pairs_NP = torch.cat([embeddings_BTC[:, 1:], hidden_BTC[:, :-1]], -1).flatten(0, 1).double()
    wanted_NC = inputs_BTC[:, 1:].flatten(0, 1).double()
    scale_P = pairs_NP.square().mean(0).sqrt().clamp_min(1e-9)  # embeddings may be a hundred times smaller
    pairs_NP = pairs_NP / scale_P
    ridge_PP = RIDGE * len(pairs_NP) * torch.eye(len(scale_P), dtype=torch.float64, device=device)
    solution_PC = torch.linalg.solve(pairs_NP.T @ pairs_NP + ridge_PP, pairs_NP.T @ wanted_NC)
    return (solution_PC / scale_P[:, None]).T
