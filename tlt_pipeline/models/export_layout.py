"""A drafter's tensors under the names that other engines load, and the table of names and shapes that guards them.

One of those loaders skips what it doesn't know, silently, so nothing is written or read that isn't in the table.
Shapes: C = hidden size, F = feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_pipeline.models.decoder import DecoderConfig
from tlt_pipeline.models.drafter import EagleDrafter
from tlt_pipeline.models.locate import ModelError

D2T, T2D = "d2t", "t2d"
"""Of a reduced draft vocabulary, as EAGLE-3 has them: target id minus draft id, by draft id [v]; may the drafter
propose a token, by target id [V]."""
NORM = "norm.weight"
"""The policy's final norm, frozen in the drafter: what its LM head reads passes through it."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the drafter and the names that it is stored under, split along its first dimension."""

    own: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    columns: int | None
    """None: a vector."""

    def shape(self, index: int) -> tuple[int, ...]:
        return (self.sizes[index],) if self.columns is None else (self.sizes[index], self.columns)


def layout_of(config: DecoderConfig) -> tuple[Entry, ...]:
    """The EAGLE drafter: `fc` and one decoder layer."""
    C, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    layer = "layers.0."
    return (
        Entry("fc.weight", ("fc.weight",), (C,), 2 * C),
        Entry("layer.input_norm.weight", (f"{layer}input_layernorm.weight",), (C,), None),
        Entry(
            "layer.qkv.weight",
            tuple(f"{layer}self_attn.{part}_proj.weight" for part in "qkv"),
            (q, kv, kv),
            C,
        ),
        Entry("layer.o.weight", (f"{layer}self_attn.o_proj.weight",), (C,), q),
        Entry("layer.mlp_norm.weight", (f"{layer}post_attention_layernorm.weight",), (C,), None),
        Entry(
            "layer.gate_up.weight",
            tuple(f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up")),
            (F, F),
            C,
        ),
        Entry("layer.down.weight", (f"{layer}mlp.down_proj.weight",), (C,), F),
    )


def table_of(config: DecoderConfig, draft_vocab: int | None = None) -> dict[str, tuple[int, ...]]:
    """Every tensor of an exported drafter with its shape. `draft_vocab`: tokens it may propose; None: all."""
    stored = {name: entry.shape(i) for entry in layout_of(config) for i, name in enumerate(entry.names)}
    ids = {} if draft_vocab is None else {D2T: (draft_vocab,), T2D: (config.vocab_size,)}
    return {**stored, NORM: (config.hidden_size,), **ids}


def split_tensors(drafter: EagleDrafter, norm_C: Tensor) -> dict[str, Tensor]:
    """The drafter's tensors and the policy's norm under their exported names, checked against the table. Raises
    ModelError: the drafter has a part that the format has no place for."""
    own = dict(drafter.named_parameters())
    state: dict[str, Tensor] = {NORM: norm_C.detach().cpu().contiguous()}
    for entry in layout_of(drafter.config):
        whole = own.pop(entry.own).detach().cpu()
        for name, part in zip(entry.names, whole.split(entry.sizes), strict=True):
            state[name] = part.contiguous().clone()
    if own:
        raise ModelError(f"the format has no place for the drafter's {sorted(own)[0]}: export it in another format")
    if drafter.draft_ids is not None:
        ids_v = drafter.draft_ids.detach().cpu()
        state[D2T] = ids_v - torch.arange(len(ids_v))
        state[T2D] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool).index_fill_(0, ids_v, True)
    check_tensors(state, drafter.config, "the drafter")
    return state


def join_tensors(state: Mapping[str, Tensor], drafter: EagleDrafter, origin: str) -> None:
    """The inverse: fills the drafter. Raises ModelError for a name or shape that isn't in the table."""
    check_tensors(state, drafter.config, origin)
    with torch.no_grad():
        for entry in layout_of(drafter.config):
            drafter.get_parameter(entry.own).copy_(torch.cat([state[name] for name in entry.names]))
    if D2T in state:
        drafter.draft_ids = state[D2T] + torch.arange(len(state[D2T]))
        if not torch.equal(state[T2D].nonzero().flatten(), drafter.draft_ids):
            raise ModelError(f"{origin}: {D2T} and {T2D} name different tokens: export it again")


def check_tensors(state: Mapping[str, Tensor], config: DecoderConfig, origin: str) -> None:
    table = table_of(config, len(state[D2T]) if D2T in state else None)
    for name in sorted({*table, *state}):
        if name not in state:
            raise ModelError(f"{origin} lacks {name}: export it again")
        if name not in table:
            raise ModelError(f"{origin} has {name}, which this drafter has no place for: it is of another kind")
        if tuple(state[name].shape) != table[name]:
            raise ModelError(
                f"{origin}: {name} has shape {tuple(state[name].shape)}, this policy's drafter has {table[name]}: "
                f"it was made for another policy"
            )
