"""Drafters as folders that serving engines load, and back. Exact both ways, to the bit.

    vllm          loads in vLLM with this project installed beside it: the plugin brings the drafter's model
                  (engine/vllm_drafter.py says why vLLM's own EAGLE class can't compute it)
    sglang, speculators   have no model that computes this drafter: refused, with the reason

What a drafter's tensors are called there is in `export_layout.py`; a drafter of another kind gets a table there and an
entry in `_WRITERS`. Beside the weights stand config.json, the policy's tokenizer (links) and a model card.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_pipeline.folders import draft_folder, put_in_place
from tlt_pipeline.models.architecture import describe, parse_config, read_hf_config
from tlt_pipeline.models.decoder import DecoderConfig, Rope
from tlt_pipeline.models.drafter import EagleDrafter
from tlt_pipeline.models.export_layout import join_tensors, split_tensors
from tlt_pipeline.models.locate import ModelError

Format = Literal["vllm", "sglang", "speculators"]
VLLM_ARCHITECTURE = "TltLlamaForCausalLMEagle3"
"""Ends in Eagle3: vLLM then takes the name as it is, and hands over auxiliary hidden states."""
_WEIGHTS = "model.safetensors"
_REFUSALS = {
    "sglang": "SGLang's EAGLE model reads the policy's state after its final norm and has no norms around its layer, "
    "this drafter reads it before and has both",
    "speculators": "speculators has no draft model with this layer (input fused by one matrix, then normed)",
}


def vllm_config(
    drafter: DecoderConfig, layers: int, dtype: torch.dtype, draft_vocab: int | None = None
) -> dict[str, Any]:
    """config.json of the drafter of a policy with so many layers. `draft_vocab`: tokens it may propose; None: all."""
    own = describe(replace(drafter, tie_word_embeddings=False), dtype)
    aux = [layers]  # vLLM counts the embedding's output as 0: the last layer's, before the final norm
    return {
        **own,
        "architectures": [VLLM_ARCHITECTURE],
        "draft_vocab_size": draft_vocab or drafter.vocab_size,
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": aux, "use_aux_hidden_state": True},
        "num_aux_hidden_states": 1,
        "tlt_drafter": {"layer": "eagle", "policy": {"num_hidden_layers": layers}},
    }


def export_drafter(
    drafter: EagleDrafter,
    policy: DecoderConfig,
    norm_C: Tensor,
    folder: Path,
    format: Format = "vllm",
    *,
    tokenizer: Path | None = None,
    card: str = "",
) -> None:
    """Writes the folder whole or not at all. `norm_C`: the policy's final norm, `tokenizer`: the policy's folder.
    Raises ModelError: the format can't hold this drafter, or the folder is there already."""
    if format != "vllm":
        raise ModelError(f"--format {format}: {_REFUSALS[format]}: take --format vllm")
    state = split_tensors(drafter, norm_C)
    dtype = next(iter(state.values())).dtype
    proposed = None if drafter.draft_ids is None else len(drafter.draft_ids)
    content = vllm_config(drafter.config, policy.num_layers, dtype, proposed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(folder) as draft:
        (draft / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        save_file(state, draft / _WEIGHTS, metadata={"format": "pt"})
        if card:
            (draft / "README.md").write_text(card)
        if tokenizer is not None:
            _link_tokenizer(tokenizer, draft)
        if not put_in_place(draft, folder):
            raise ModelError(f"{folder} is there already: give another folder")


def import_drafter(
    folder: Path, policy: DecoderConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> EagleDrafter:
    """The exported drafter, for this policy. Raises ModelError: another kind, or another policy's."""
    content = read_hf_config(folder)
    if not is_exported(content):
        raise ModelError(f"{folder} holds no drafter that `tlt export-drafter` wrote: its config.json has another kind")
    drafter = EagleDrafter(policy)
    wanted = asdict(replace(drafter.config, tie_word_embeddings=False))
    found = asdict(parse_config({**content, "architectures": ["LlamaForCausalLM"]}, str(folder)))
    layers = content["tlt_drafter"]["policy"]["num_hidden_layers"]
    for key, value, expected in [(key, found[key], wanted[key]) for key in wanted] + [
        ("layers", layers, policy.num_layers)
    ]:
        if value != expected:
            raise ModelError(f"{folder}: this drafter was made for a policy with {key} {value}, not {expected}")
    try:
        state = load_file(folder / _WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder}: weights can't be read ({error}): export the drafter again") from error
    join_tensors(state, drafter, str(folder))
    drafter = drafter.to(device=device, dtype=dtype)
    drafter.rope = Rope(drafter.config).to(device)
    return drafter


def is_exported(content: dict[str, Any]) -> bool:
    """Does this config.json belong to an exported drafter?"""
    return VLLM_ARCHITECTURE in (content.get("architectures") or []) and "tlt_drafter" in content


def _link_tokenizer(policy: Path, folder: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    for name in names:
        if (policy / name).is_file():
            (folder / name).symlink_to((policy / name).resolve())
