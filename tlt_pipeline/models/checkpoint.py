"""Decoder from and to Hugging Face folders: config.json (architecture.py), model.safetensors or its shards.

The decoder's matrices are fused (q, k, v; gate, up), the files' aren't: `_layout` says which join into
which. Drafters have a format of their own here: their trainable tensors by our names, and a config.json
that tells for which policy they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_pipeline.models.architecture import describe, read_config, read_hf_config
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, Rope
from tlt_pipeline.models.drafter import Drafter, EagleDrafter
from tlt_pipeline.models.eagle3 import Eagle3Drafter
from tlt_pipeline.models.export import import_drafter, is_exported
from tlt_pipeline.models.locate import ModelError

SHARD_BYTES = 5 * 10**9
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DRAFT_IDS = "draft_ids"
_EAGLE, _EAGLE3 = "tlt_eagle", "tlt_eagle3"
_FROZEN = ("embed.", "embed_tokens.", "norm.", "lm_head.")
_IGNORED = ("rotary_emb.inv_freq",)


def load_decoder(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """The folder's model. Raises ModelError if it is missing, torn, unsupported or unlike its config.json."""
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        model = Decoder(config)
    with _Tensors(folder) as stored:
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
        save_file(shards[0], folder / _WEIGHTS, metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
    total = sum(_bytes(tensor) for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


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
    _refuse_frozen(state, folder)
    content: dict[str, Any] = {"architectures": [type(drafter).__name__], "model_type": f"tlt_{drafter.kind}"}
    content |= asdict(drafter.config)
    if isinstance(drafter, Eagle3Drafter):
        content |= {"taps": list(drafter.taps), "draft_vocab_size": drafter.own_head.out_features}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})


def is_drafter(folder: Path) -> bool:
    """Whether a drafter of ours, or an exported one, is in this folder."""
    if not (folder / "config.json").is_file():
        return False
    config = read_hf_config(folder)
    return config.get("model_type") in (_EAGLE, _EAGLE3) or is_exported(config)


def load_drafter(
    folder: str | Path,
    policy_config: DecoderConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Drafter:
    """A drafter for this policy, ours, of the kind that the folder holds, or exported. Raises ModelError: no drafter,
    another policy's, or with frozen tensors in it."""
    folder = Path(folder)
    stored_config = read_hf_config(folder)
    if is_exported(stored_config):
        return import_drafter(folder, policy_config, dtype, device)
    drafter = _empty_drafter(stored_config, policy_config, folder)
    expected = json.loads(json.dumps(asdict(drafter.config)))
    for key, value in expected.items():
        if stored_config.get(key) != value:
            raise ModelError(
                f"{folder}: this drafter was made for a policy with {key} {stored_config.get(key)}, "
                f"not {value}: take another drafter or from_policy_layer"
            )
    with _Tensors(folder) as stored:
        _refuse_frozen(stored.names, folder)
        state: dict[str, Tensor] = {}
        for name, parameter in drafter.named_parameters():
            tensor = stored.take(name)
            if tensor.shape != parameter.shape:
                raise ModelError(
                    f"{folder}: {name} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}: "
                    f"the file is damaged or another policy's, take another drafter or from_policy_layer"
                )
            state[name] = tensor.to(device=device, dtype=dtype, copy=True)
        drafter.draft_ids = _take_draft_ids(stored, policy_config.vocab_size, folder, device)
        stored.refuse_left_over(tied=False)
    rows = policy_config.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    if isinstance(drafter, Eagle3Drafter) and rows != drafter.own_head.out_features:
        raise ModelError(f"{folder}: a head of {drafter.own_head.out_features} rows for {rows} tokens: train it anew")
    drafter.load_state_dict(state, strict=False, assign=True)
    drafter.rope = Rope(drafter.config).to(device)
    return drafter


def read_taps(folder: str | Path) -> tuple[int, ...]:
    """The policy layers that the folder's drafter reads besides the last hidden state. Raises ModelError."""
    return tuple(read_hf_config(folder).get("taps", ()))


def _empty_drafter(stored: Mapping[str, Any], policy: DecoderConfig, folder: Path) -> EagleDrafter | Eagle3Drafter:
    with torch.device("meta"):
        if stored.get("model_type") == _EAGLE:
            return EagleDrafter(policy)
        if stored.get("model_type") != _EAGLE3:
            raise ModelError(f"{folder} holds no drafter: give a folder that `tlt` wrote, or from_policy_layer")
        taps, size = stored.get("taps"), stored.get("draft_vocab_size")
        if not isinstance(taps, list) or not taps or not all(tap in range(policy.num_layers) for tap in taps):
            raise ModelError(f"{folder}: taps must be layers of the policy, below {policy.num_layers}: train it anew")
        if not isinstance(size, int) or not 0 < size <= policy.vocab_size:
            raise ModelError(f"{folder}: draft_vocab_size must be up to {policy.vocab_size}: train it anew")
        return Eagle3Drafter(policy, taps, size)


def _take_draft_ids(stored: _Tensors, vocab_size: int, folder: Path, device: str | torch.device) -> Tensor | None:
    if _DRAFT_IDS not in stored.names:
        return None
    ids = stored.take(_DRAFT_IDS).to(torch.int64)
    ascending = ids.ndim == 1 and len(ids) > 0 and bool((ids[1:] > ids[:-1]).all())
    if not ascending or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ModelError(f"{folder}: {_DRAFT_IDS} must be ascending token ids below {vocab_size}: train it again")
    return ids.to(device, copy=True)


def _refuse_frozen(names: Iterable[str], folder: Path) -> None:
    frozen = sorted(name for name in names if name.removeprefix("model.").startswith(_FROZEN))
    if frozen:
        raise ModelError(
            f"{folder}: a drafter must not carry the policy's {frozen[0]}, which would overwrite it: "
            f"export the drafter again with its own tensors only"
        )


def _layout(config: DecoderConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each parameter of the decoder with the Hugging Face tensors that it joins along its first dimension."""
    yield "embed.weight", ("model.embed_tokens.weight",)
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


class _Tensors:
    """The tensors of a folder, read one at a time from whichever file holds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._left: dict[str, str] = {}

    def __enter__(self) -> _Tensors:
        try:
            for name in self._file_names():
                opened = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
                self._files[name] = opened
                self._left.update(dict.fromkeys(opened.keys(), name))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise ModelError(f"{self._folder}: weights can't be read ({error}): copy the model again") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """What hasn't been taken yet."""
        return sorted(self._left)

    def _file_names(self) -> list[str]:
        index = self._folder / _INDEX
        if index.is_file():
            return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if (self._folder / _WEIGHTS).is_file():
            return [_WEIGHTS]
        raise ModelError(f"{self._folder} has neither {_WEIGHTS} nor {_INDEX}: save the model as safetensors")

    def take(self, name: str) -> Tensor:
        if name not in self._left:
            raise ModelError(f"{self._folder}: the weights lack {name}: copy the model again, or fix config.json")
        return self._files[self._left.pop(name)].get_tensor(name)

    def refuse_left_over(self, *, tied: bool) -> None:
        """Tensors that nothing reads mean that config.json tells of another model: wrong logits, silently."""
        ignored = (*_IGNORED, "lm_head.weight") if tied else _IGNORED
        unread = sorted(name for name in self._left if not name.endswith(ignored))
        if unread:
            raise ModelError(
                f"{self._folder}: config.json has no place for {len(unread)} tensors, such as {unread[0]}: "
                f"fix config.json (biases, norms, layers)"
            )
