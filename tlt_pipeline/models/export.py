"""Drafters as folders that serving engines load, and back. Exact both ways, to the bit.

               eagle3                            eagle
    vllm       stock vLLM (and SGLang) loads it  vLLM with this project installed beside it, whose plugin brings the
                                                 drafter's model (engine/vllm_drafter.py says why stock can't)
    sglang     SGLang (and stock vLLM) loads it  no model there computes it: refused, with the reason
    speculators  stock vLLM loads it             as sglang

What an engine computes from these tensors was read in its source and is repeated, in few lines, in the tests. Names and
shapes are in `export_layout.py`, config.json is in `export_config.py`. Beside the weights stand the policy's tokenizer
(links) and a model card.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_pipeline.folders import draft_folder, put_in_place
from tlt_pipeline.models.architecture import read_hf_config
from tlt_pipeline.models.decoder import DecoderConfig
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.drafter_config import PLUGIN_ARCHITECTURE, DrafterShape, Style, style_of
from tlt_pipeline.models.drafter_files import read_drafter, shape_of
from tlt_pipeline.models.export_config import flat_config, speculators_config, vllm_config
from tlt_pipeline.models.export_layout import D2T, NORM, T2D, layout_of, table_of
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tensor_files import WEIGHTS

__all__ = [
    "VLLM_ARCHITECTURE",
    "Format",
    "check_exportable",
    "export_drafter",
    "import_drafter",
    "is_exported",
    "vllm_config",
]

Format = Literal["vllm", "sglang", "speculators"]
VLLM_ARCHITECTURE = PLUGIN_ARCHITECTURE
_REFUSALS = {
    "sglang": "SGLang's EAGLE model reads the policy's state after its final norm and has no norms around its layer, "
    "this drafter reads it before and has both",
    "speculators": "speculators has no draft model with this layer (input fused by one matrix, then normed)",
}


def export_drafter(
    drafter: Drafter,
    policy: DecoderConfig,
    norm_C: Tensor,
    folder: Path,
    format: Format = "vllm",
    *,
    tokenizer: Path | None = None,
    card: str = "",
    tokens: int = 4,
) -> None:
    """Writes the folder whole or not at all. `norm_C`: the policy's final norm, `tokenizer`: the policy's folder,
    `tokens`: proposed a step, where the format says it. Raises ModelError: the format can't hold this drafter, or the
    folder is there already."""
    shape = shape_of(drafter)
    style = _choose_style(shape, format)
    state = split_tensors(drafter, style, norm_C)
    content = _describe(drafter, shape, style, policy, next(iter(state.values())).dtype, tokenizer, tokens)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(folder) as draft:
        (draft / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        save_file(state, draft / WEIGHTS, metadata={"format": "pt"})
        if card:
            (draft / "README.md").write_text(card)
        if tokenizer is not None:
            _link_tokenizer(tokenizer, draft)
        if not put_in_place(draft, folder):
            raise ModelError(f"{folder} is there already: give another folder")


def check_exportable(drafter: Drafter, format: Format) -> None:
    """Raises ModelError where the format can't hold this drafter."""
    _choose_style(shape_of(drafter), format)


def import_drafter(
    folder: Path,
    policy: DecoderConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    embedding_VC: Tensor | None = None,
) -> Drafter:
    """The drafter in a folder that a serving engine loads, for this policy. Raises ModelError: another kind, another
    policy's, or damaged."""
    if style_of(read_hf_config(folder)) == "own":
        raise ModelError(f"{folder} is a folder of ours already: drafter.init takes it as it is")
    return read_drafter(folder, policy, dtype, device, embedding_VC)


def is_exported(content: dict[str, Any]) -> bool:
    """Does this config.json belong to a drafter for serving engines?"""
    return style_of(content) not in (None, "own")


def split_tensors(drafter: Drafter, style: Style, norm_C: Tensor) -> dict[str, Tensor]:
    """The drafter's tensors under their exported names, as the table has them. Raises ModelError: it has a part that
    the format has no place for, or tokens that its head doesn't have."""
    shape = shape_of(drafter)
    own = dict(drafter.named_parameters())
    state: dict[str, Tensor] = {}
    for entry in layout_of(shape, style):
        whole = own.pop(entry.own).detach().cpu()
        for name, part in zip(entry.names, whole.split(entry.sizes), strict=True):
            state[name] = part.contiguous().clone()
    if own:
        raise ModelError(f"the format has no place for the drafter's {sorted(own)[0]}: export it in another format")
    if style == "plugin":
        state[NORM] = norm_C.detach().cpu().contiguous()
    ids_v = _stored_ids(drafter, shape)
    if ids_v is not None:
        state[D2T] = ids_v - torch.arange(len(ids_v))
        state[T2D] = torch.zeros(shape.layer.vocab_size, dtype=torch.bool).index_fill_(0, ids_v, True)
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert found == table_of(shape, style, None if ids_v is None else len(ids_v))
    return state


def _stored_ids(drafter: Drafter, shape: DrafterShape) -> Tensor | None:
    """A map from a whole vocabulary to itself isn't stored: vLLM has no place for it."""
    rows = shape.layer.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    if shape.draft_vocab not in (None, rows):
        raise ModelError(f"a head of {shape.draft_vocab} rows for {rows} tokens: train the drafter anew")
    if drafter.draft_ids is None or (drafter.owns_head and rows == shape.layer.vocab_size):
        return None
    return drafter.draft_ids.detach().cpu()


def _choose_style(shape: DrafterShape, format: Format) -> Style:
    if shape.kind == "eagle":
        if format != "vllm":
            raise ModelError(f"--format {format}: {_REFUSALS[format]}: take --format vllm")
        return "plugin"
    taps = list(shape.taps)
    if taps != sorted(set(taps)):
        raise ModelError(
            f"the drafter reads the policy's layers {taps}, and serving engines read each once, in ascending order: "
            f"train one for a policy of at least 4 layers"
        )
    if format != "vllm" and len(taps) != 3:
        raise ModelError(
            f"--format {format}: it has three hidden states, this drafter reads {taps}: take --format vllm"
        )
    if format == "sglang" and taps[0] == 0:
        raise ModelError("--format sglang: SGLang can't hand over the input of layer 0: take --format vllm")
    if format == "sglang" and shape.norm_before_residual:
        raise ModelError("--format sglang: SGLang's model has no norm_before_residual: take --format vllm")
    return "speculators" if format == "speculators" else "flat"


def _describe(
    drafter: Drafter,
    shape: DrafterShape,
    style: Style,
    policy: DecoderConfig,
    dtype: torch.dtype,
    source: Path | None,
    tokens: int,
) -> dict[str, Any]:
    if style == "plugin":
        proposed = None if drafter.draft_ids is None else len(drafter.draft_ids)
        return vllm_config(shape.layer, policy.num_layers, dtype, proposed)
    if style == "speculators":
        return speculators_config(shape, policy, str(source.resolve()) if source else "", tokens, dtype)
    return flat_config(shape, policy.num_layers, dtype)


def _link_tokenizer(policy: Path, folder: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    for name in names:
        if (policy / name).is_file():
            (folder / name).symlink_to((policy / name).resolve())
