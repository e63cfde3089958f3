"""The start-up check behind the claim of a run (design 5.1): does a row's result depend on the batch around it?

Matrix products are tried with many row counts, attention with the KV lengths to come, on inputs that leave nothing but
rounding (probes.py); then the same tokens are read one at a time alone, and in batches, verify widths and whole
prompts: the logits must be equal to the bit. The first layout that passes is used. What is tried doesn't depend on an
engine's batch, so that engines of one machine agree.
Shapes: B = rows, T = tokens of a row, V = vocabulary, L = KV length, D = head size, Q = queries.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.config import ConfigError
from tlt_pipeline.engine.cache import KVCache
from tlt_pipeline.engine.forward import PREFILL_WIDTH, Forward
from tlt_pipeline.engine.layout import LENGTH_BLOCK, Layout, exact_layouts, plain_layout, round_up
from tlt_pipeline.engine.probes import AttentionProbe, AttentionProbes, cancelling_product
from tlt_pipeline.messages import Claim
from tlt_pipeline.models.decoder import Decoder

MOST_ROWS = 160
"""Row counts up to this one are tried, all of them while it costs no more than `WORK`."""
WORK = 4e9
"""Multiplications spent on the row counts of one weight matrix: well under a second."""
FEWEST_COUNTS = 6
MOST_READ = 8
"""Rows that are read side by side."""
MOST_LAYERS = 4
"""Layers that they are read with."""
KV_SPLIT = 512
"""PyTorch's attention kernel for CPUs goes through the keys in blocks of this size."""
MOST_LENGTHS = 64
"""KV lengths that are told apart; a longer context is padded more coarsely."""


def decide_exactness(policy: Decoder, wanted: Literal["auto", "on", "off"], longest: int) -> tuple[Layout, Claim]:
    """-> (how passes are laid out, what may be claimed). `longest`: positions that a cache will hold. Raises
    ConfigError where exactness was demanded (`engine.exact: on`) and this machine doesn't give it."""
    dtype = policy.embed.weight.dtype
    fallback: Claim = "distribution" if dtype == torch.bfloat16 else "float32"
    if wanted == "off":
        return plain_layout(policy), fallback
    for candidate in exact_layouts(policy):
        layout = replace(candidate, lengths=usable_lengths(policy, candidate, longest))
        if is_batch_invariant(Forward(policy, layout)):
            return layout, "exact"
    if wanted == "on":
        raise ConfigError(
            f"engine.exact is on, but on this machine a row's bits depend on the batch in {dtype}: "
            f"set engine.exact to auto, or try engine.dtype=float32 or other engine.threads"
        )
    return plain_layout(policy), fallback


@torch.inference_mode()
def usable_lengths(policy: Decoder, layout: Layout, longest: int) -> tuple[int, ...]:
    """KV lengths at which attention gives the bits that it gives at the greatest one, where the keys beyond are
    masked."""
    greatest = round_up(longest, KV_SPLIT)
    queries = max(layout.queries, 1)
    probes = _attention_probes(policy, queries, greatest)
    step = round_up(greatest // MOST_LENGTHS + 1)

    def agree(L: int) -> bool:
        return all(
            torch.equal(_attend(probe, queries, L, used), _attend(probe, queries, greatest, used))
            for used in (L, L - LENGTH_BLOCK // 2, L // 2)
            for probe in (probes.scores, probes.values(used))
        )

    return (*(L for L in range(step, greatest, step) if agree(L)), greatest)


def _queries_are_independent(policy: Decoder, layout: Layout) -> bool:
    """A query's result among few and among as many as a prompt's pass has."""
    config = policy.config
    most = layout.padded_queries(PREFILL_WIDTH * config.num_heads // config.num_kv_heads)
    probes = _attention_probes(policy, most, KV_SPLIT)
    counts = sorted({layout.padded_queries(count) for count in (1, 2, 5, 9, 17, 40, 66, 130, 200)})
    for probe in (probes.scores, probes.values(KV_SPLIT)):
        expected = _attend(probe, most, KV_SPLIT, KV_SPLIT)
        for count in counts:
            if count <= most and not torch.equal(_attend(probe, count, KV_SPLIT, KV_SPLIT), expected[:, :, :count]):
                return False
    return True


def _attention_probes(policy: Decoder, queries: int, length: int) -> AttentionProbes:
    """Of as many heads as the policy has: threads share the work by heads; one head alone is worked on otherwise."""
    config = policy.config
    return AttentionProbes(config.num_kv_heads, queries, length, config.head_dim, policy.embed.weight)


def _attend(probe: AttentionProbe, queries: int, length: int, used: int) -> Tensor:
    """Attention of the first `queries` queries that sees `length` keys, those from `used` on masked."""
    q = probe.q[:, :, :queries]
    mask_QL = q.new_zeros((queries, length))
    mask_QL[:, used:] = float("-inf")
    return F.scaled_dot_product_attention(q, probe.k[:, :, :length], probe.v[:, :, :length], attn_mask=mask_QL)


@torch.inference_mode()
def is_batch_invariant(forward: Forward, length: int = 48) -> bool:
    """Tries the products, then compares reading `length` random tokens in one row, a token a pass, with reading them
    among other rows, several a pass."""
    forward = Forward(_first_layers(forward.policy), forward.layout)
    layout = forward.layout
    if layout.queries > 1 and not _queries_are_independent(forward.policy, layout):
        return False
    if not _products_are_invariant(forward):
        return False
    config, device = forward.policy.config, forward.policy.embed.weight.device
    length = min(length, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(config.vocab_size, (MOST_READ, length), generator=generator).to(device)
    reference = _read(forward, tokens_BT[:1], [1] * length)
    shapes = [(1, 5), (MOST_READ, 1), (MOST_READ, 5), (3, 4), (2, 7), (1, length), (5, 33)]
    return all(torch.equal(reference, _read(forward, tokens_BT[:rows], _widths(length, w))) for rows, w in shapes)


def _first_layers(policy: Decoder) -> Decoder:
    """A policy of fewer layers on the same weights: layers are alike, and reading with all of SmolLM2's 30 takes 10 s
    of each start."""
    shallow = copy.copy(policy)
    shallow.config = replace(policy.config, num_layers=min(policy.config.num_layers, MOST_LAYERS))
    shallow._modules = policy._modules | {"layers": policy.layers[: shallow.config.num_layers]}
    return shallow


def _products_are_invariant(forward: Forward) -> bool:
    """Every shape of weight matrix in the policy, with many row counts."""
    policy, linear = forward.policy, forward.layout.linear
    for shape in sorted({module.weight.shape for module in policy.modules() if isinstance(module, torch.nn.Linear)}):
        x, weight = cancelling_product(linear.padded(MOST_ROWS), shape, policy.embed.weight)
        expected = linear(x, weight, None)
        for rows in _row_counts(weight.numel()):
            padded = torch.cat([x[:rows], x.new_zeros(linear.padded(rows) - rows, x.shape[1])])
            if not torch.equal(linear(padded, weight, None)[:rows], expected[:rows]):
                return False
    return True


def _row_counts(size: int) -> list[int]:
    affordable = max(int(WORK / (size * MOST_ROWS / 2)), FEWEST_COUNTS)
    step = max(MOST_ROWS // affordable, 1)
    return sorted({*range(1, MOST_ROWS, step), *range(1, min(affordable, MOST_ROWS))})


def _widths(length: int, width: int) -> list[int]:
    whole, rest = divmod(length, width)
    return [width] * whole + ([rest] if rest else [])


def _read(forward: Forward, tokens_BT: Tensor, widths: list[int]) -> Tensor:
    """Logits of the first row [T, V]."""
    weight = forward.policy.embed.weight
    room = forward.layout.padded_length(tokens_BT.shape[1] + LENGTH_BLOCK)
    cache = KVCache(forward.policy.config, tokens_BT.shape[0], room, weight.dtype, weight.device)
    logits, start = [], 0
    for width in widths:
        positions_W = torch.arange(start, start + width, device=weight.device)
        tokens_BW = tokens_BT[:, start : start + width]
        # rows at different lengths stretch what attention sees, as in a real batch
        longest = start + width + (LENGTH_BLOCK if tokens_BT.shape[0] > 1 else 0)
        hidden = forward.hidden(cache, tokens_BW, positions_W.expand_as(tokens_BW), longest)
        logits.append(forward.logits(hidden)[:width])
        start += width
    return torch.cat(logits)
