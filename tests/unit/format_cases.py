"""What serving engines compute of an exported EAGLE-3 folder, in few lines, from their sources (vLLM's llama_eagle3.py
and llama.py, SGLang's llama_eagle3.py): nothing of this project's models is used, so that it says when they differ.

Shapes: T = tokens of a text, C = hidden size, v = draft vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x_THD: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """NeoX style: the first half of a head with the second."""
    half = x_THD.shape[-1] // 2
    angles_TD = positions_T[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angles_TD.cos()[:, None], angles_TD.sin()[:, None]
    first, second = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
    """Causal, the queries being the last ones; a key/value head serves several heads [T, H * D]."""
    repeat = q_THD.shape[1] // k_THD.shape[1]
    k, v = k_THD.repeat_interleave(repeat, 1), v_THD.repeat_interleave(repeat, 1)
    scores = torch.einsum("thd,shd->hts", q_THD, k) / q_THD.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(len(k) - len(q_THD))
    return torch.einsum("hts,shd->thd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v).flatten(1)


@dataclass
class Folder:
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Folder:
        return cls(json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors"))


def project(config: dict[str, Any], get: Any, x: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values."""
    out: list[Tensor] = []
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        y = F.linear(x, get(f"self_attn.{part}_proj.weight"), get(f"self_attn.{part}_proj.bias"))
        y = y.view(len(x), config[heads], config["head_dim"])
        if (scale := get(f"self_attn.{part}_norm.weight")) is not None:
            y = norm(y, scale, config["rms_norm_eps"])
        out.append(y if part == "v" else rotate(y, positions_T, config["rope_theta"]))
    return out[0], out[1], out[2]


def feed_forward(get: Any, x: Tensor) -> Tensor:
    gate, up = (F.linear(x, get(f"mlp.{part}_proj.weight")) for part in ("gate", "up"))
    return F.linear(F.silu(gate) * up, get("mlp.down_proj.weight"))


def policy_states(policy: Folder, tokens_T: Tensor, wanted: list[int]) -> list[Tensor]:
    """Auxiliary state 0 is the embedding, i + 1 what layer i gives; each once, in ascending order, whatever `wanted`
    says [T, C]."""
    config, tensors = policy.config, policy.tensors
    positions_T, eps = torch.arange(len(tokens_T)), config["rms_norm_eps"]
    x = tensors["model.embed_tokens.weight"][tokens_T]
    states = [x]
    for index in range(config["num_hidden_layers"]):

        def get(name: str, index: int = index) -> Tensor | None:
            return tensors.get(f"model.layers.{index}.{name}")

        q, k, v = project(config, get, norm(x, get("input_layernorm.weight"), eps), positions_T)
        x = x + F.linear(attend(q, k, v), get("self_attn.o_proj.weight"))
        x = x + feed_forward(get, norm(x, get("post_attention_layernorm.weight"), eps))
        states.append(x)
    return [states[index] for index in sorted(set(wanted))]


class Drafting:
    """One answer's drafting with what is in the folder."""

    def __init__(self, folder: Folder, policy: Folder, prefix: str) -> None:
        self.config = folder.config.get("transformer_layer_config") or folder.config
        self.top, self.tensors, self.prefix = folder.config, folder.tensors, prefix
        self.embedding = policy.tensors["model.embed_tokens.weight"]
        self.past: tuple[Tensor, Tensor] | None = None

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(self.prefix + name)

    def fuse(self, states: list[Tensor]) -> Tensor:
        return F.linear(torch.cat(states, -1), self.tensors["fc.weight"])

    def step(self, tokens_T: Tensor, hidden_TC: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs (token t + 1, hidden state of t) -> logits over the draft vocabulary, hidden states to go on with."""
        eps = self.config["rms_norm_eps"]
        residual = hidden_TC
        normed = norm(hidden_TC, self.get("hidden_norm.weight"), eps)
        if self.top["norm_before_residual"]:
            residual = normed
        pair = torch.cat([norm(self.embedding[tokens_T], self.get("input_layernorm.weight"), eps), normed], -1)
        q, k, v = project(self.config, self.get, pair, positions_T)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k]), torch.cat([self.past[1], v])
        self.past = k, v
        x = residual + F.linear(attend(q, k, v), self.get("self_attn.o_proj.weight"))
        x = x + feed_forward(self.get, norm(x, self.get("post_attention_layernorm.weight"), eps))
        return F.linear(norm(x, self.tensors["norm.weight"], eps), self.tensors["lm_head.weight"]), x

    def to_policy(self, drafted: Tensor) -> Tensor:
        """Token ids of the policy: d2t is what to add."""
        offsets_v = self.tensors.get("d2t")
        return drafted if offsets_v is None else drafted + offsets_v[drafted]

    def propose(self, tokens_T: Tensor, states: list[Tensor], depth: int) -> tuple[list[Tensor], list[int]]:
        """After a text, greedily: the logits of each step [v], and the tokens."""
        logits: list[Tensor] = []
        drafted: list[int] = []
        last = len(tokens_T) - 1
        scores, hidden = self.step(tokens_T[1:], self.fuse(states)[:-1], torch.arange(last))
        for step in range(depth):
            logits.append(scores[-1])
            drafted.append(int(self.to_policy(scores[-1].argmax())))
            if step + 1 < depth:
                scores, hidden = self.step(torch.tensor(drafted[-1:]), hidden[-1:], torch.tensor([last + step]))
        return logits, drafted


def aux_ids(config: dict[str, Any], engine: str, layers: int) -> list[int]:
    """Which states an engine hands to the drafter: vLLM reads the top level first, SGLang `eagle_config` alone, and
    counts layers' outputs; without any both take the inputs of layers 2, n / 2 and n - 3."""
    key = "eagle_aux_hidden_state_layer_ids"
    inner = (config.get("eagle_config") or {}).get(key)
    if engine == "sglang":
        return [each + 1 for each in inner] if inner else [2, layers // 2, layers - 3]
    return config.get(key) or inner or [2, layers // 2, layers - 3]
