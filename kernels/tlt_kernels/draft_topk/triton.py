"""One program a row. A candidate is one int64 that orders like (value, then lower id), so that candidates never tie.

Shapes: N = rows, V = vocabulary, K = siblings.
"""

import torch
from torch import Tensor

from tlt_kernels.gateway import Launch, jit, next_power_of_2, tl
from tlt_kernels.noise.triton import gumbel, load_keys
from tlt_pipeline.engine.gumbel_table import gumbel_table
from tlt_pipeline.engine.sampling import RowSampling

BLOCK, WARPS = 2048, 8
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NOTHING = tl.constexpr(-(1 << 63))


@jit
def flip_if_negative(bits):
    """Between a float32's bits and an int32 that orders like the float; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def topk_kernel(
    logits, row_stride, keys, hashes, offsets, slopes, inverse_temperature, noise_scale, tokens, scores, V,
    K: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse_temperature + row)
    scale = tl.load(noise_scale + row)
    key_0, key_1 = load_keys(keys, row)
    best = tl.full((PLACES,), _NOTHING, tl.int64) + tl.arange(0, PLACES)
    maximum, total = tl.full((), _LOWEST, tl.float32), 0.0
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        inside = ids < V
        scaled = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        token_hashes = tl.load(hashes + ids, mask=inside, other=0).to(tl.uint32, bitcast=True)
        # + 0.0 turns -0.0 into 0.0: they are equal, and must order as equals
        perturbed = scaled + gumbel(token_hashes, key_0, key_1, offsets, slopes) * scale + 0.0

        new_maximum = tl.maximum(maximum, tl.max(perturbed, 0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(perturbed - new_maximum), 0)
        maximum = new_maximum

        order = flip_if_negative(perturbed.to(tl.int32, bitcast=True)).to(tl.int64)
        candidates = tl.where(inside, (order << 32) | (0x7FFFFFFF - ids).to(tl.int64), _NOTHING)
        candidate = tl.max(candidates, 0)
        lowest = tl.min(best, 0)
        while candidate > lowest:
            best = tl.where(best == lowest, candidate, best)
            candidates = tl.where(candidates == candidate, _NOTHING, candidates)
            candidate = tl.max(candidates, 0)
            lowest = tl.min(best, 0)
    normalizer = maximum + tl.log(total)
    for place in tl.static_range(K):
        candidate = tl.max(best, 0)
        best = tl.where(best == candidate, _NOTHING, best)
        value = flip_if_negative((candidate >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        tl.store(tokens + row * K + place, 0x7FFFFFFF - (candidate & 0x7FFFFFFF))
        tl.store(scores + row * K + place, value - normalizer)


def prepare(
    logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, sampling: RowSampling, k: int
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    assert logits_NV.stride(-1) == 1, "rows must be contiguous"
    (N, V), device = logits_NV.shape, logits_NV.device
    tokens_NK = torch.empty(N, k, dtype=torch.int64, device=device)
    scores_NK = torch.empty(N, k, device=device)
    offsets, slopes = gumbel_table(device)
    pointers = {
        "logits": logits_NV,
        "keys": keys_N2.contiguous(),
        "hashes": hashes_V,
        "offsets": offsets,
        "slopes": slopes,
        "inverse_temperature": sampling.inverse_temperature_N1.float().contiguous(),
        "noise_scale": sampling.noise_scale_N1.float().contiguous(),
        "tokens": tokens_NK,
        "scores": scores_NK,
    }
    numbers = {"row_stride": logits_NV.stride(0), "V": V}
    constants = {"K": k, "PLACES": next_power_of_2(k), "BLOCK": BLOCK}
    return Launch(topk_kernel, (N,), pointers | numbers, constants, WARPS), (tokens_NK, scores_NK)


def draft_topk(
    logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, sampling: RowSampling, k: int
) -> tuple[Tensor, Tensor]:
    launch, best = prepare(logits_NV, keys_N2, hashes_V, sampling, k)
    launch.run()
    return best
