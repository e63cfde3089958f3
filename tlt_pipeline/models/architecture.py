"""config.json of a Hugging Face folder to the decoder's configuration, and back.

Llama, Qwen2 and Qwen3 (dense). What the decoder doesn't compute (experts, sliding windows, other rotary
scalings, quantised weights) is refused in one line. Both spellings of the rotary settings are read and
written: transformers 5 has `rope_parameters`, older files and other engines `rope_theta` and `rope_scaling`.
No torch here: folders are checked before anything heavy is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tlt_pipeline.models.dimensions import DecoderConfig, RopeScaling
from tlt_pipeline.models.locate import ModelError

if TYPE_CHECKING:
    import torch

SUPPORTED = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read_config(folder: str | Path) -> DecoderConfig:
    """Raises ModelError if the folder is no model or one that the decoder can't compute."""
    return parse_config(read_hf_config(folder), str(folder))


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json as it stands."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json: give a Hugging Face model folder")
    try:
        content: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} can't be read ({error.strerror}): see to its permissions") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}): copy the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is no JSON object: copy the model again")
    return cast(dict[str, Any], content)


def parse_config(content: Mapping[str, Any], origin: str = "config") -> DecoderConfig:
    """A Hugging Face config to ours. Raises ModelError for what is missing, damaged or unsupported."""
    try:
        config = _parse(content, origin)
    except ModelError:
        raise
    except KeyError as error:
        raise ModelError(f"{origin}: config.json lacks {error.args[0]!r}: is the folder complete?") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{origin}: config.json has a value of the wrong kind ({error}): copy it again") from error
    check_sizes(config, origin)
    return config


def check_sizes(config: DecoderConfig, origin: str) -> None:
    """Raises ModelError for dimensions that no decoder can have."""
    for part in (config, config.rope_scaling):
        for field in fields(part) if part is not None else ():
            value, kind = getattr(part, field.name), str(field.type)
            number = isinstance(value, int | float if kind == "float" else int) and not isinstance(value, bool)
            if kind in ("int", "float") and not (number and value > 0):
                raise ModelError(f"{origin}: {field.name} can't be {value!r}: fix config.json or copy the folder again")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{origin}: {config.num_heads} heads for {config.num_kv_heads} key/value heads of {config.head_dim} can't "
            f"be: fix config.json or copy the folder again"
        )


def _parse(content: Mapping[str, Any], origin: str) -> DecoderConfig:
    kind = _check_supported(content, origin)
    heads, hidden = content["num_attention_heads"], content["hidden_size"]
    theta, scaling = _parse_rope(content, origin)
    attention_bias = kind == "qwen2" or bool(content.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=content["vocab_size"],
        hidden_size=hidden,
        intermediate_size=content["intermediate_size"],
        num_layers=content["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=content.get("num_key_value_heads") or heads,
        # Qwen3's config class has a default of its own; the others derive it
        head_dim=content.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
        max_position_embeddings=content.get("max_position_embeddings", 32768 if kind != "llama" else 2048),
        rms_norm_eps=content.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=attention_bias,
        o_bias=attention_bias and kind != "qwen2",
        mlp_bias=kind == "llama" and bool(content.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        tie_word_embeddings=bool(content.get("tie_word_embeddings", False)),
    )


def describe(config: DecoderConfig, dtype: torch.dtype | str = "float32") -> dict[str, Any]:
    """The inverse of `parse_config`: what config.json says of such a model.

    Raises ModelError for a combination that no supported architecture has."""
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.o_bias else "llama"
    biased = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias} if kind != "qwen2" else {}
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3", **asdict(config.rope_scaling)}
    content: dict[str, Any] = {
        "architectures": [SUPPORTED[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "bos_token_id": None,  # or transformers fills in Llama's
        "eos_token_id": None,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        **biased,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if parse_config(content) != config:
        raise ModelError("no supported architecture has this combination of biases and norms: change the config")
    return content


def _check_supported(content: Mapping[str, Any], origin: str) -> str:
    kind = content.get("model_type")
    if kind not in SUPPORTED:
        raise ModelError(f"{origin}: model_type {kind!r} is not supported: take a dense {', '.join(SUPPORTED)} model")
    layers: list[Any] = content.get("layer_types") or []
    windowed = content.get("use_sliding_window") or any(layer != "full_attention" for layer in layers)
    experts = any(content.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    for found, what in (
        (experts, "experts (MoE)"),
        (windowed, "sliding-window attention"),
        (content.get("quantization_config"), "quantised weights"),
        (content.get("hidden_act", "silu") != "silu", f"activation {content.get('hidden_act')!r}"),
    ):
        if found:
            raise ModelError(f"{origin}: {what} is not supported: take a dense {', '.join(SUPPORTED)} model")
    return str(kind)


def _parse_rope(content: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5), `rope_theta`, `rope_scaling`."""
    rope = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or content.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{origin}: partial rotary embedding is not supported: take another model")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"{origin}: rotary scaling {kind!r} is not supported (llama3 is): remove rope_scaling "
            f"from config.json to run within the original context"
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return theta, RopeScaling(**{key: rope[key] for key in keys})
