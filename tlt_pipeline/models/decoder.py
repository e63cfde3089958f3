"""One decoder for Llama, Qwen2 and Qwen3 (dense), used by the learner, the engine and the drafter alike.

What differs between those users is passed in as `Ops`: how a matrix product is computed (the engine's is
batch-invariant) and how attention sees the past (a KV cache, or a causal mask). Weights are stored fused
(q, k, v in one matrix, gate and up in another): fewer calls a token.
Shapes: N = any leading dimensions, C = hidden size, H = query heads, K = key/value heads, D = head size,
F = feed-forward size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_pipeline.models.dimensions import DecoderConfig as DecoderConfig
from tlt_pipeline.models.dimensions import RopeScaling as RopeScaling


class Attend(Protocol):
    """Attention over past and present. q: [N, H, D], k and v: [N, K, D] after RoPE -> [N, H, D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [N, in], weight [out, in], bias [out] or None) -> [N, out]."""


@dataclass(frozen=True)
class Ops:
    attend: Attend
    linear: Linear = F.linear


class CausalAttention:
    """Attention within rows of [B, T]: causal, and only inside one document. `mask_BTT` True where a query
    may look; None: plain causal."""

    def __init__(self, mask_BTT: Tensor | None = None) -> None:
        self.mask = None if mask_BTT is None else mask_BTT.unsqueeze(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=q.shape[-2] != k.shape[-2],
        )
        return out.transpose(1, 2)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Computed in float32 for half precisions, as transformers does. [N, C] -> [N, C]."""
        if not torch.is_grad_enabled() and x.dtype != torch.float64:
            return _norm_quickly(x, self.weight, self.eps)
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)
        return normed * self.weight


def _norm_quickly(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in half as many calls, for inference: F.rms_norm is made of ten on a CPU."""
    length = torch.linalg.vector_norm(x, 2, (-1,), True, dtype=torch.float32)
    scale = torch.addcmul(_constant(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()
    return torch.mul(x, scale).to(x.dtype).mul_(weight)


@lru_cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


class Rope(nn.Module):
    """Rotary position embedding; cos and sin are tables, so that a position costs one gather."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        frequencies = rope_frequencies(config)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), frequencies)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([-angles, angles], -1).sin(), persistent=False)

    def gather(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [N] -> cos, sin (signed for the first half) [N, 1, D]."""
        return self.cos[positions].unsqueeze(-2).to(dtype), self.sin[positions].unsqueeze(-2).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] -> the same, rotated by its position."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Inverse wavelengths [D / 2], with Llama-3's scaling where the model has it."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    wavelength = 2 * torch.pi / inverse
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = torch.where(wavelength > low, inverse / scaling.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        C, D = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * D, config.num_kv_heads * D
        self.input_norm = RMSNorm(C, config.rms_norm_eps)
        self.qkv = nn.Linear(C, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.o = nn.Linear(q_size, C, bias=config.o_bias)
        self.mlp_norm = RMSNorm(C, config.rms_norm_eps)
        self.gate_up = nn.Linear(C, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, C, bias=config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, ops: Ops) -> Tensor:
        """x [N, C] -> [N, C]."""
        return self._feed_forward(x + self._attention(self.input_norm(x), cos, sin, layer, ops), ops)

    def _feed_forward(self, x: Tensor, ops: Ops) -> Tensor:
        gate, up = ops.linear(self.mlp_norm(x), self.gate_up.weight, self.gate_up.bias).chunk(2, -1)
        return x + ops.linear(F.silu(gate) * up, self.down.weight, self.down.bias)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, ops: Ops) -> Tensor:
        heads, kv_heads, D = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qk, v = ops.linear(x, self.qkv.weight, self.qkv.bias).split([(heads + kv_heads) * D, kv_heads * D], -1)
        qk, v = qk.view(*x.shape[:-1], -1, D), v.view(*x.shape[:-1], -1, D)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[..., :heads, :]), self.k_norm(qk[..., heads:, :])], -2)
        q, k = rotate(qk, cos, sin).split([heads, kv_heads], -2)
        out = ops.attend(layer, q, k, v)
        return ops.linear(out.flatten(-2), self.o.weight, self.o.bias)


class Decoder(nn.Module):
    """The policy. `hidden` gives features before the last norm; `logits` turns features into scores."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight
        self.rope = Rope(config)

    def hidden(self, tokens: Tensor, positions: Tensor, ops: Ops, taps: tuple[int, ...] = ()) -> Tensor:
        """tokens, positions [N] (int64) -> features of the last layer, before the final norm [N, C]. With `taps`, the
        inputs of these layers stand before them, in the order given [N, (taps + 1) * C]."""
        x = self.embed(tokens)
        cos, sin = self.rope.gather(positions, x.dtype)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped[index] = x
            x = layer(x, cos, sin, index, ops)
        return torch.cat([*(tapped[index] for index in taps), x], -1) if taps else x

    def logits(self, hidden: Tensor, linear: Linear = F.linear) -> Tensor:
        """hidden [N, C] -> [N, V], in the model's dtype."""
        return linear(self.norm(hidden), self.lm_head.weight, None)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, mask_BTT: Tensor | None = None) -> Tensor:
        """Plain causal forward: tokens [B, T] -> logits [B, T, V]."""
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        return self.logits(self.hidden(tokens_BT, positions_BT, Ops(CausalAttention(mask_BTT))))


def initialize(model: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """Random start weights, drawn in a fixed order: normal for matrices (narrower where they write into the residual
    stream, by 1 / sqrt(2 · layers), as in GPT-2), zero for biases, one for norms."""
    writers = [name for name, _ in model.named_parameters() if name.endswith((".o.weight", ".down.weight"))]
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.ndim >= 2:
                scale = len(writers) ** -0.5 if name in writers else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
