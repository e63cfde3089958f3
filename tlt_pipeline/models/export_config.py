"""config.json of a drafter, as our folders and those of serving engines have it (drafter_config.py reads them)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tlt_pipeline.models.architecture import describe
from tlt_pipeline.models.dimensions import DecoderConfig
from tlt_pipeline.models.drafter_config import AUX, PLUGIN_ARCHITECTURE, DrafterShape

if TYPE_CHECKING:
    import torch

SPECULATORS_VERSION = "0.4.0"
"""Of the format."""


def own_config(shape: DrafterShape) -> dict[str, Any]:
    """config.json of one of our folders."""
    name = {"eagle": "EagleDrafter", "eagle3": "Eagle3Drafter"}[shape.kind]
    content: dict[str, Any] = {"architectures": [name], "model_type": f"tlt_{shape.kind}", **asdict(shape.layer)}
    if shape.kind == "eagle3":
        content |= {
            "taps": list(shape.taps),
            "draft_vocab_size": shape.draft_vocab,
            "norm_before_residual": shape.norm_before_residual,
        }
    return content


def vllm_config(
    drafter: DecoderConfig, layers: int, dtype: torch.dtype, draft_vocab: int | None = None
) -> dict[str, Any]:
    """config.json of the EAGLE drafter of a policy with so many layers. `draft_vocab`: tokens it may propose; None:
    all."""
    own = describe(replace(drafter, tie_word_embeddings=False), dtype)
    aux = [layers]  # vLLM counts the embedding's output as 0: the last layer's, before the final norm
    return {
        **own,
        "architectures": [PLUGIN_ARCHITECTURE],
        "draft_vocab_size": draft_vocab or drafter.vocab_size,
        AUX: aux,
        "eagle_config": {AUX: aux, "use_aux_hidden_state": True},
        "num_aux_hidden_states": 1,
        "tlt_drafter": {"layer": "eagle", "policy": {"num_hidden_layers": layers}},
    }


def flat_config(shape: DrafterShape, layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter for vLLM and SGLang."""
    content = {
        **describe(replace(shape.layer, tie_word_embeddings=False), dtype),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.layer.hidden_size,
        "norm_before_residual": shape.norm_before_residual,
        "num_aux_hidden_states": len(shape.taps),
        AUX: list(shape.taps),
        "tlt_drafter": {"layer": "eagle3", "policy": {"num_hidden_layers": layers}},
    }
    if min(shape.taps) > 0:
        content["eagle_config"] = {AUX: [tap - 1 for tap in shape.taps], "use_aux_hidden_state": True}
    return content


def speculators_config(shape: DrafterShape, policy: DecoderConfig, name: str, tokens: int, dtype: torch.dtype) -> Any:
    """config.json of an EAGLE-3 drafter in the format of speculators. `name`: the policy's folder or hub id, `tokens`:
    proposed a step."""
    layer = describe(replace(shape.layer, tie_word_embeddings=False), dtype)
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": name, "architectures": describe(policy)["architectures"]}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        AUX: list(shape.taps),
        "dtype": layer["dtype"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
    }
