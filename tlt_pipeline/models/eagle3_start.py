"""An EAGLE-3 drafter that already drafts: fitted to the policy's last layer, without a gradient step.

Its layer can't begin as the policy's last one, as EAGLE's does: its residual stream begins with what was known before
the newest token, which only attention sees. So the parts are fitted one after the other (ridge regression) to what
they stand for in the last layer at token t+1: `fc` to the residual stream between attention and MLP, queries, keys and
values to that layer's, the output projection to what is missing of that residual stream after attention. MLP, norm and
head's rows are the policy's.
Shapes as in drafter.py; T = tokens of a text, N = all pairs, Q = sizes of query, key and value together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_pipeline.models.decoder import CausalAttention, Decoder, Ops, rotate
from tlt_pipeline.models.drafter import random_texts, solve_ridge
from tlt_pipeline.models.eagle3 import Eagle3Drafter, default_taps


@torch.no_grad()
def eagle3_from_policy(policy: Decoder, texts: Sequence[Tensor] = (), draft_ids: Tensor | None = None) -> Eagle3Drafter:
    """`texts`: token ids [T] each, such as the policy writes; none: random tokens. `draft_ids` [v]: what it may propose
    from now on; None: all tokens."""
    weight = policy.embed.weight
    vocab = weight.shape[0] if draft_ids is None else len(draft_ids)
    drafter = Eagle3Drafter(policy.config, default_taps(policy.config.num_layers), vocab).to(weight)
    drafter.draft_ids = None if draft_ids is None else draft_ids.to(weight.device)
    last, layer = policy.layers[-1], drafter.layer
    for name in ("mlp_norm.weight", "gate_up.weight", "down.weight"):
        layer.get_parameter(name).copy_(last.get_parameter(name))
    layer.input_norm.weight.copy_(policy.layers[0].input_norm.weight)
    layer.hidden_norm.weight.copy_(last.input_norm.weight)
    drafter.own_norm.weight.copy_(policy.norm.weight)
    drafter.own_head.weight.copy_(drafter.policy_rows(policy.lm_head.weight))
    texts = texts or random_texts(policy)
    _fit(drafter, [_read(policy, drafter.taps, tokens_T.to(weight.device, torch.int64)) for tokens_T in texts])
    return drafter


@dataclass(frozen=True)
class _Read:
    """What a text's pairs read, and what the policy's last layer has at their token t+1."""

    embeddings_TC: Tensor
    features_TF: Tensor
    qkv_TQ: Tensor
    """Before rotation."""
    middle_TC: Tensor
    """The residual stream between attention and MLP."""


def _read(policy: Decoder, taps: tuple[int, ...], tokens_T: Tensor) -> _Read:
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    cos, sin = policy.rope.gather(positions_T, policy.embed.weight.dtype)
    attention, seen = CausalAttention(), {}
    last = policy.config.num_layers - 1

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(layer, q[None], k[None], v[None])[0]
        if layer == last:
            seen["qkv"] = torch.cat([rotate(q, cos, -sin), rotate(k, cos, -sin), v], -2).flatten(-2)
            seen["o"] = policy.layers[last].o(out.flatten(-2))
        return out

    features_TF = policy.hidden(tokens_T, positions_T, Ops(attend), (*taps, last))
    size = policy.config.hidden_size
    inputs_TC, fed_TF = features_TF[:, -2 * size : -size], features_TF[:, : -2 * size]
    middle_TC = inputs_TC + seen["o"]
    return _Read(policy.embed(tokens_T)[1:], fed_TF[:-1], seen["qkv"][1:], middle_TC[1:])


def _fit(drafter: Eagle3Drafter, read: Sequence[_Read]) -> None:
    layer = drafter.layer
    drafter.fc.weight.copy_(_regress([(each.features_TF, each.middle_TC) for each in read]))
    fused = [drafter.fuse(each.features_TF) for each in read]
    pairs = [
        torch.cat([layer.input_norm(each.embeddings_TC), layer.hidden_norm(hidden_TC)], -1)
        for each, hidden_TC in zip(read, fused, strict=True)
    ]
    layer.qkv.weight.copy_(_regress([(pair, each.qkv_TQ) for pair, each in zip(pairs, read, strict=True)]))
    layer.o.weight.copy_(
        _regress(
            [
                (_attend(drafter, pair), each.middle_TC - hidden_TC)
                for pair, each, hidden_TC in zip(pairs, read, fused, strict=True)
            ]
        )
    )


def _attend(drafter: Eagle3Drafter, pair_TP: Tensor) -> Tensor:
    """What the drafter's heads give for a text's pairs [T, H * D]."""
    config = drafter.config
    heads, kv_heads = config.num_heads, config.num_kv_heads
    q, k, v = drafter.layer.qkv(pair_TP).view(len(pair_TP), -1, config.head_dim).split([heads, kv_heads, kv_heads], 1)
    cos, sin = drafter.rope.gather(torch.arange(len(pair_TP), device=pair_TP.device), pair_TP.dtype)
    return CausalAttention()(0, rotate(q, cos, sin)[None], rotate(k, cos, sin)[None], v[None])[0].flatten(-2)


def _regress(examples: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """(x [T, in], y [T, out]) of each text -> the linear map [out, in], by ridge regression in float64."""
    count = sum(len(x) for x, _ in examples)
    square = torch.stack([x.double().T @ x.double() for x, _ in examples]).sum(0)
    product = torch.stack([x.double().T @ y.double() for x, y in examples]).sum(0)
    return solve_ridge(square, product, count)
