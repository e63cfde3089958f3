"""A drafter's tensors under the names that they are stored by, and the table of names and shapes that guards them.

One of the engines that load them skips what it doesn't know, silently, so nothing is written or read that isn't in the
table. No torch here: a folder's headers are held against the table before anything heavy is imported.
Shapes: C = hidden size, F = feed-forward size, V = vocabulary, v = draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tlt_pipeline.models.dimensions import DecoderConfig
from tlt_pipeline.models.drafter_config import DrafterShape, Style, read_shape
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tensor_files import FLOATS, INTEGERS, Header, read_headers

D2T, T2D = "d2t", "t2d"
"""Of a reduced draft vocabulary, as EAGLE-3 has them: target id minus draft id, by draft id [v]; may the drafter
propose a token, by target id [V]."""
DRAFT_IDS = "draft_ids"
"""The same in our folders: target ids [v]."""
NORM = "norm.weight"
"""Of an EAGLE drafter, the policy's final norm, frozen: what its LM head reads passes through it."""
EMBEDDING = "embed_tokens.weight"
"""Of an EAGLE-3 drafter, the policy's, where a folder has it at all."""
_FROZEN = ("embed.", "embed_tokens.", "norm.", "lm_head.")


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


def layout_of(shape: DrafterShape, style: Style) -> tuple[Entry, ...]:
    """All tensors that the drafter is made of."""
    entries = _layer_of(shape, "midlayer." if style == "flat" else "layers.0.")
    if style == "own":
        return tuple(Entry(each.own, (each.own,), (sum(each.sizes),), each.columns) for each in entries)
    return entries


def _layer_of(shape: DrafterShape, prefix: str) -> tuple[Entry, ...]:
    config, eagle3 = shape.layer, shape.kind == "eagle3"
    C, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    inputs = len(shape.taps) if eagle3 else 2
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    entries = (
        Entry("fc.weight", ("fc.weight",), (C,), inputs * C),
        Entry("layer.input_norm.weight", (f"{prefix}input_layernorm.weight",), (C,), None),
        Entry(
            "layer.qkv.weight",
            tuple(f"{attention}{part}_proj.weight" for part in "qkv"),
            (q, kv, kv),
            2 * C if eagle3 else C,
        ),
        Entry("layer.o.weight", (f"{attention}o_proj.weight",), (C,), q),
        Entry("layer.mlp_norm.weight", (f"{prefix}post_attention_layernorm.weight",), (C,), None),
        Entry("layer.gate_up.weight", tuple(f"{mlp}{part}_proj.weight" for part in ("gate", "up")), (F, F), C),
        Entry("layer.down.weight", (f"{mlp}down_proj.weight",), (C,), F),
    )
    if not eagle3:
        return entries
    assert shape.draft_vocab is not None
    return (
        *entries,
        Entry("layer.hidden_norm.weight", (f"{prefix}hidden_norm.weight",), (C,), None),
        Entry("own_norm.weight", ("norm.weight",), (C,), None),
        Entry("own_head.weight", ("lm_head.weight",), (shape.draft_vocab,), C),
    )


def table_of(shape: DrafterShape, style: Style, draft_ids: int | None = None) -> dict[str, tuple[int, ...]]:
    """Every tensor that must be stored, with its shape. `draft_ids`: so many tokens may be proposed; None: all."""
    table = {name: entry.shape(i) for entry in layout_of(shape, style) for i, name in enumerate(entry.names)}
    if style == "plugin":
        table[NORM] = (shape.layer.hidden_size,)
    if draft_ids is not None and style == "own":
        table[DRAFT_IDS] = (draft_ids,)
    elif draft_ids is not None:
        table |= {D2T: (draft_ids,), T2D: (shape.layer.vocab_size,)}
    return table


def check_folder(folder: Path, policy: DecoderConfig) -> DrafterShape:
    """What a drafter's folder holds, by its config and the headers of its weights: milliseconds. Raises ModelError as
    reading it would, but for what only the tensors say."""
    style, shape = read_shape(folder, policy)
    found = read_headers(folder)
    check_tensors(found, shape, style, str(folder))
    if EMBEDDING in found:
        raise ModelError(explain_embedding(folder))
    return shape


def check_kind(found: str, wanted: str, folder: Path) -> None:
    if found != wanted:
        raise ModelError(
            f"{folder} holds a drafter of kind {found}, drafter.kind is {wanted}: "
            f"set drafter.kind={found}, or drafter.init=from_policy_layer"
        )


def explain_embedding(folder: Path) -> str:
    return (
        f"{folder} carries an embedding of its own: hold it against the policy's with `tlt import-drafter {folder} "
        f"--policy MODEL --out DIR`, and take DIR"
    )


def check_tensors(found: Mapping[str, Header], shape: DrafterShape, style: Style, origin: str) -> None:
    """Raises ModelError for a name, a shape or a type that isn't in the table."""
    if style == "own":
        refuse_frozen(found, origin)
    size = _stated_ids(found, shape, style, origin)
    table = table_of(shape, style, size)
    optional = {T2D, EMBEDDING} if shape.kind == "eagle3" and style != "own" else set[str]()
    table |= {EMBEDDING: (shape.layer.vocab_size, shape.layer.hidden_size)} if optional else {}
    for name in sorted({*table, *found}):
        if name not in found:
            if name in optional:
                continue
            raise ModelError(f"{origin}: the weights lack {name}: copy the folder again, or export it again")
        if name not in table:
            raise ModelError(f"{origin} has {name}, which this drafter has no place for: it is of another kind")
        if found[name].shape != table[name]:
            raise ModelError(
                f"{origin}: {name} is {found[name].shape}, not {table[name]}: the file is damaged or another policy's, "
                f"take another drafter or from_policy_layer"
            )
        wanted = ("BOOL",) if name == T2D else INTEGERS if name in (D2T, DRAFT_IDS) else FLOATS
        if found[name].dtype not in wanted:
            raise ModelError(
                f"{origin}: {name} can't be {found[name].dtype}: the file is damaged, take another drafter or "
                f"from_policy_layer"
            )


def _stated_ids(found: Mapping[str, Header], shape: DrafterShape, style: Style, origin: str) -> int | None:
    """How many tokens the stored ids name; None: there are none stored. An own head has a row for each."""
    name = DRAFT_IDS if style == "own" else D2T
    size = found[name].shape[0] if name in found and found[name].shape else None
    vocab = shape.layer.vocab_size
    if shape.draft_vocab is not None and shape.draft_vocab != (vocab if size is None else size):
        rows = vocab if size is None else size
        raise ModelError(f"{origin}: a head of {shape.draft_vocab} rows for {rows} tokens: train it anew")
    return size


def refuse_frozen(found: Iterable[str], origin: str) -> None:
    """Raises ModelError for names that are the policy's."""
    frozen = sorted(name for name in found if name.removeprefix("model.").startswith(_FROZEN))
    if frozen:
        raise ModelError(
            f"{origin}: a drafter must not carry the policy's {frozen[0]}, which would overwrite it: "
            f"export the drafter again with its own tensors only"
        )
