"""Decoder from and to Hugging Face folders: config.json (architecture.py), model.safetensors or its shards.

The decoder's matrices are fused (q, k, v; gate, up), the files' aren't: `_layout` says which join into
which. Drafters have a format of their own here: their trainable tensors by our names, and a config.json
that tells for which policy they are; drafter_files.py reads it, and public formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_pipeline.models.architecture import describe, read_config, read_hf_config
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, Rope
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.drafter_config import style_of
from tlt_pipeline.models.drafter_files import read_drafter, shape_of
from tlt_pipeline.models.export_config import own_config
from tlt_pipeline.models.export_layout import refuse_frozen
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tensor_files import INDEX, WEIGHTS, TensorFiles

SHARD_BYTES = 5 * 10**9
_EMBEDDING = "model.embed_tokens.weight"


def load_decoder(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """The folder's model. Raises ModelError if it is missing, torn, unsupported or unlike its config.json."""
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        model = Decoder(config)
    with TensorFiles(folder) as stored:
        state: dict[str, Tensor] = {}
        for name, sources in _layout(config):
            parts = [stored.take(source) for source in sources]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            expected = model.get_parameter(name).shape
            if joined.shape != expected:
                raise ModelError(
                    f"{folder}: {name} (from {', '.join(sources)}) has shape {tuple(joined.shape)}, "
                    f"config.json says {tuple(expected)}: fix config.json or copy the model again"
                )
            # a copy even where nothing changes: the file's mapping is not aligned, and alignment can change
            # bits
            state[name] = joined.to(device=device, dtype=dtype, copy=True)
        stored.refuse_left_over(tied=config.tie_word_embeddings)
    model.load_state_dict(state, strict=False, assign=True)
    return _complete(model, device)


def save_decoder(
    model: Decoder,
    folder: str | Path,
    hf_config: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and the weights (in `dtype`, or as they are), in shards of `shard_bytes`.

    `hf_config` adds what the decoder doesn't know of (eos_token_id, …). For an atomic write give a temporary
    folder and rename it (tlt_pipeline/weights.py does)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.embed.weight.dtype
    own = describe(model.config, dtype)
    config = {**own, **(hf_config or {}), **{key: value for key, value in own.items() if value is not None}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards = _split(state_of(model, dtype), shard_bytes)
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
    total = sum(_bytes(tensor) for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def state_of(model: Decoder, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The weights under their Hugging Face names, on the CPU."""
    config = model.config
    state: dict[str, Tensor] = {}
    for name, sources in _layout(config):
        tensor = model.get_parameter(name).detach().to(device="cpu", dtype=dtype)
        if len(sources) == 1:
            sizes = [tensor.shape[0]]
        elif len(sources) == 2:
            sizes = [config.intermediate_size] * 2
        else:
            sizes = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
        for source, part in zip(sources, tensor.split(sizes), strict=True):
            state[source] = part.contiguous()
    return state


def save_drafter(drafter: Drafter, folder: str | Path) -> None:
    """Writes the drafter's trainable tensors and config.json. The policy's frozen ones are never written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    refuse_frozen(state, str(folder))
    (folder / "config.json").write_text(json.dumps(own_config(shape_of(drafter)), indent=2) + "\n")
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def is_drafter(folder: Path) -> bool:
    """Whether a drafter that `tlt` wrote is in this folder, for itself or for a serving engine."""
    if not (folder / "config.json").is_file():
        return False
    return style_of(read_hf_config(folder)) in ("own", "plugin")


def load_drafter(
    folder: str | Path,
    policy_config: DecoderConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Drafter:
    """A drafter for this policy, of the kind that the folder holds: ours, exported, or of a public format. Raises
    ModelError: no drafter, another policy's, damaged, or with frozen tensors in it."""
    return read_drafter(Path(folder), policy_config, dtype, device)


def read_embedding(folder: Path) -> Tensor:
    """The policy's, as it is stored [V, C]. Raises ModelError."""
    with TensorFiles(folder) as stored:
        return stored.take(_EMBEDDING).clone()


def _layout(config: DecoderConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each parameter of the decoder with the Hugging Face tensors that it joins along its first dimension."""
    yield "embed.weight", (_EMBEDDING,)
    for index in range(config.num_layers):
        own, theirs = f"layers.{index}", f"model.layers.{index}"
        yield f"{own}.input_norm.weight", (f"{theirs}.input_layernorm.weight",)
        yield f"{own}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",)
        if config.qk_norm:
            yield f"{own}.q_norm.weight", (f"{theirs}.self_attn.q_norm.weight",)
            yield f"{own}.k_norm.weight", (f"{theirs}.self_attn.k_norm.weight",)
        for name, block, sources, biased in (
            ("qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            ("o", "self_attn", ("o_proj",), config.o_bias),
            ("gate_up", "mlp", ("gate_proj", "up_proj"), config.mlp_bias),
            ("down", "mlp", ("down_proj",), config.mlp_bias),
        ):
            for part in ("weight", "bias") if biased else ("weight",):
                yield f"{own}.{name}.{part}", tuple(f"{theirs}.{block}.{source}.{part}" for source in sources)
    yield "norm.weight", ("model.norm.weight",)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", ("lm_head.weight",)


def _complete(model: Decoder, device: str | torch.device) -> Decoder:
    """Built on the meta device and filled by assignment, a model lacks the tied head and rotary tables."""
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed.weight
    model.rope = Rope(model.config).to(device)
    return model


def _split(state: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in state.items():
        if shards[-1] and used + _bytes(tensor) > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += _bytes(tensor)
    return shards


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
