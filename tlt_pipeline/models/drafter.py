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

from tlt_pipeline.models.decoder import Decoder, DecoderConfig, DecoderLayer, Ops, Rope


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


def drafter_from_policy(policy: Decoder) -> EagleDrafter:
    """A start that already drafts a little: the policy's last layer over the sum of embedding and feature."""
    drafter = EagleDrafter(policy.config)
    last = policy.layers[-1]
    with torch.no_grad():
        for name, parameter in drafter.layer.named_parameters():
            parameter.copy_(last.get_parameter(name))
        C = policy.config.hidden_size
        drafter.fc.weight.copy_(torch.cat([torch.eye(C), torch.eye(C)], 1))
    return drafter.to(device=policy.embed.weight.device, dtype=policy.embed.weight.dtype)
