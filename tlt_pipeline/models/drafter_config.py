"""What config.json says of a drafter: in our folders, and in those that serving engines load (export_config.py writes
those).

    own           what `tlt` trains with and publishes
    plugin        an EAGLE drafter of ours for vLLM with this project beside it (engine/vllm_drafter.py says why)
    flat          EAGLE-3 as SpecForge writes it, for SGLang and vLLM
    speculators   EAGLE-3 as the speculators library writes it, for vLLM

An auxiliary hidden state has a number. vLLM's is that of the layer whose input it is, as with our taps; SGLang's is
that of the layer whose output it is, one less. vLLM reads the ids at the top level first, SGLang those in
`eagle_config` only, so a flat folder can hold both and loads in both. No torch here: folders are checked before
anything heavy is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from tlt_pipeline.models.architecture import check_sizes, parse_config, read_hf_config
from tlt_pipeline.models.dimensions import DecoderConfig, RopeScaling
from tlt_pipeline.models.locate import ModelError

Style = Literal["own", "plugin", "flat", "speculators"]
PLUGIN_ARCHITECTURE = "TltLlamaForCausalLMEagle3"
"""Ends in Eagle3: vLLM then takes the name as it is, and hands over auxiliary hidden states."""
EAGLE, EAGLE3 = "tlt_eagle", "tlt_eagle3"
AUX = "eagle_aux_hidden_state_layer_ids"
_OF_THE_LAYER = (
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
)
"""What an EAGLE-3 drafter may have otherwise than its policy."""
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "bias", "parallel_drafting", "quantization_config")


@dataclass(frozen=True)
class DrafterShape:
    """`layer`: the drafter's own dimensions. `draft_vocab`: rows of its head; None: it has the policy's.
    `norm_before_residual`: an EAGLE-3 layer's residual stream begins with the normed hidden state."""

    kind: Literal["eagle", "eagle3"]
    layer: DecoderConfig
    taps: tuple[int, ...] = ()
    draft_vocab: int | None = None
    norm_before_residual: bool = False


def layer_of(policy: DecoderConfig) -> DecoderConfig:
    """The dimensions of a drafter that is made for the policy: one layer of it, no biases, no q/k norm."""
    return replace(policy, num_layers=1, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)


def style_of(content: Mapping[str, Any]) -> Style | None:
    """None: no drafter that we know."""
    architectures = [str(name) for name in _list(content.get("architectures"))]
    if content.get("model_type") in (EAGLE, EAGLE3):
        return "own"
    if PLUGIN_ARCHITECTURE in architectures:
        return "plugin"
    if content.get("speculators_model_type"):
        return "speculators"
    # some of the first EAGLE-3 folders call themselves LlamaForCausalLM
    early = content.get("model_type") == "llama" and "draft_vocab_size" in content
    public = not str(content.get("model_type")).startswith("tlt_")
    return "flat" if public and (early or any("Eagle3" in name for name in architectures)) else None


def read_shape(folder: Path, policy: DecoderConfig) -> tuple[Style, DrafterShape]:
    """Raises ModelError: no drafter, another policy's, or one that the engine doesn't compute."""
    content = read_hf_config(folder)
    style = style_of(content)
    if style is None:
        heads = "EAGLE-1 heads read the policy's state after its final norm, which none here does; "
        raise ModelError(
            f"{folder} holds no drafter: {heads if content.get('num_hidden_layers') == 1 else ''}give a folder that "
            f"`tlt` wrote, an EAGLE-3 one of SpecForge, SGLang, vLLM or speculators, or from_policy_layer"
        )
    if style == "own":
        return style, _read_own(content, policy, folder)
    if style == "plugin":
        return style, _read_plugin(content, policy, folder)
    return style, _read_eagle3(content, policy, folder, style)


def read_taps(folder: Path, layers: int) -> tuple[int, ...]:
    """The policy layers that the folder's drafter reads besides the last hidden state. Raises ModelError."""
    content = read_hf_config(folder)
    style = style_of(content)
    if style in ("flat", "speculators"):
        return _parse_aux(content, layers, folder)
    taps = content.get("taps", ())
    return _check_taps(tuple(_list(taps)), layers, folder) if taps else ()


def _read_own(content: Mapping[str, Any], policy: DecoderConfig, folder: Path) -> DrafterShape:
    expected = layer_of(policy)
    if content["model_type"] == EAGLE:
        _refuse_others(content, json.loads(json.dumps(asdict(expected))), folder)
        return DrafterShape("eagle", expected)
    _refuse_others(content, {key: getattr(expected, key) for key in ("vocab_size", "hidden_size")}, folder)
    lacks = [key for key in _OF_THE_LAYER if key not in content]
    if lacks:
        raise ModelError(f"{folder}: config.json lacks {lacks[0]!r}: is the folder complete?")
    own = {key: content[key] for key in _OF_THE_LAYER}
    own["rope_scaling"] = _parse_scaling(own["rope_scaling"], folder)
    layer = replace(expected, **own)
    check_sizes(layer, str(folder))
    return DrafterShape(
        "eagle3",
        layer,
        _check_taps(tuple(_list(content.get("taps"))), policy.num_layers, folder),
        _check_vocab(content.get("draft_vocab_size"), policy, folder),
        content.get("norm_before_residual", False) is True,
    )


def _read_plugin(content: Mapping[str, Any], policy: DecoderConfig, folder: Path) -> DrafterShape:
    found = asdict(_parse_layer(content, folder))
    layers = _at(content, folder, "tlt_drafter", "policy", "num_hidden_layers")
    expected = layer_of(policy)
    wanted = asdict(replace(expected, tie_word_embeddings=False))
    _refuse_others({**found, "layers": layers}, {**wanted, "layers": policy.num_layers}, folder)
    return DrafterShape("eagle", expected)


def _read_eagle3(content: Mapping[str, Any], policy: DecoderConfig, folder: Path, style: Style) -> DrafterShape:
    inner: Mapping[str, Any] = content
    if style == "speculators":
        if content["speculators_model_type"] != "eagle3":
            raise ModelError(f"{folder}: speculators' {content['speculators_model_type']!r} isn't supported, eagle3 is")
        inner = _at(content, folder, "transformer_layer_config")
        if "norm_before_residual" not in content:
            raise ModelError(
                f"{folder}: config.json doesn't say norm_before_residual, for which its readers have different "
                f"defaults: add what it was trained with"
            )
    layer = _parse_layer(inner, folder)
    _refuse_variants(content, folder)
    made_for = {"vocab_size": layer.vocab_size, "hidden_size": layer.hidden_size}
    target = content.get("target_hidden_size")
    if target is not None:
        made_for["hidden_size"] = target
    wanted = {"vocab_size": policy.vocab_size, "hidden_size": policy.hidden_size}
    if "tlt_drafter" in content:
        made_for["layers"] = _at(content, folder, "tlt_drafter", "policy", "num_hidden_layers")
        wanted["layers"] = policy.num_layers
    _refuse_others(made_for, wanted, folder)
    _refuse_others(asdict(layer), {"hidden_size": policy.hidden_size, "num_layers": 1}, folder)
    unlike = [key for key in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if getattr(layer, key)]
    if unlike:
        raise ModelError(f"{folder}: a drafter with {unlike[0]} isn't supported: take another, or from_policy_layer")
    own = {key: getattr(layer, key) for key in _OF_THE_LAYER}
    size = content.get("draft_vocab_size")
    return DrafterShape(
        "eagle3",
        replace(layer_of(policy), **own),
        _parse_aux(content, policy.num_layers, folder),
        _check_vocab(policy.vocab_size if size is None else size, policy, folder),
        content.get("norm_before_residual", False) is True,
    )


def _refuse_variants(content: Mapping[str, Any], folder: Path) -> None:
    everything = {**_eagle_config(content, folder), **content}
    for key in _UNSUPPORTED:
        if everything.get(key):
            raise ModelError(f"{folder}: a drafter with {key} isn't supported: take another, or from_policy_layer")
    if everything.get("use_aux_hidden_state", True) is not True or everything.get("logit_scale", 1.0) != 1.0:
        raise ModelError(
            f"{folder}: a drafter without auxiliary states, or with a scale of its logits, isn't supported: take "
            f"another, or from_policy_layer"
        )


def _refuse_others(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ModelError(
                f"{folder}: this drafter was made for a policy with {key} {found.get(key)}, not {value}: "
                f"take another drafter or from_policy_layer"
            )


def _parse_layer(content: Mapping[str, Any], folder: Path) -> DecoderConfig:
    if not isinstance(content, dict):
        raise ModelError(f"{folder}: transformer_layer_config is no JSON object: copy the folder again")
    return parse_config({**content, "tie_word_embeddings": False}, str(folder))


def _parse_aux(content: Mapping[str, Any], layers: int, folder: Path) -> tuple[int, ...]:
    """The taps that a folder of a public format names, or what its engines read where it names none."""
    ids, counted_from = content.get(AUX), 0
    if not ids:
        ids, counted_from = _eagle_config(content, folder).get(AUX), 1
    if not ids:
        ids, counted_from = [2, layers // 2, layers - 3], 0
    if not _list(ids) or not all(isinstance(each, int) for each in _list(ids)):
        raise ModelError(f"{folder}: {AUX} must be a list of layers: copy the folder again")
    taps = _check_taps(tuple(each + counted_from for each in _list(ids)), layers, folder)
    if list(taps) != sorted(set(taps)):
        raise ModelError(f"{folder}: {AUX} must ascend, its engines read each layer once and in order: {list(taps)}")
    return taps


def _eagle_config(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    found: Any = content.get("eagle_config") or {}
    if not isinstance(found, dict):
        raise ModelError(f"{folder}: eagle_config is no JSON object: copy the folder again")
    return cast(dict[str, Any], found)


def _check_taps(taps: tuple[Any, ...], layers: int, folder: Path) -> tuple[int, ...]:
    if not taps or not all(isinstance(tap, int) and 0 <= tap < layers for tap in taps):
        raise ModelError(
            f"{folder}: taps must be layers of the policy, below {layers}, not {list(taps)}: take another drafter, or "
            f"train it anew"
        )
    return taps


def _check_vocab(size: Any, policy: DecoderConfig, folder: Path) -> int:
    if not isinstance(size, int) or not 0 < size <= policy.vocab_size:
        raise ModelError(f"{folder}: draft_vocab_size must be up to {policy.vocab_size}, not {size!r}: train it anew")
    return size


def _parse_scaling(stored: Any, folder: Path) -> RopeScaling | None:
    if stored is None:
        return None
    names = {field.name for field in fields(RopeScaling)}
    given = cast(dict[str, Any], stored) if isinstance(stored, dict) else {}
    if set(given) != names:
        raise ModelError(f"{folder}: rope_scaling must have {', '.join(sorted(names))}: copy the folder again")
    return RopeScaling(**given)


def _at(content: Mapping[str, Any], folder: Path, *path: str) -> Any:
    found: Any = content
    for key in path:
        inner: dict[str, Any] = cast(dict[str, Any], found) if isinstance(found, dict) else {}
        if key not in inner:
            raise ModelError(f"{folder}: config.json lacks {'.'.join(path)!r}: is the folder complete?")
        found = inner[key]
    return found


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
