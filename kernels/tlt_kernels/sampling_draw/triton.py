"""One program a row. Only [N] outputs are written. Shapes: N = rows, V = vocabulary."""

import torch
from torch import Tensor

from tlt_kernels.gateway import Launch, jit, tl
from tlt_kernels.noise.triton import gumbel, load_keys
from tlt_kernels.sampling_draw.reference import Border, filter_border
from tlt_pipeline.engine.gumbel_table import gumbel_table
from tlt_pipeline.engine.sampling import Draw, RowSampling

BLOCK, WARPS = 2048, 8
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@jit
def draw_kernel(
    logits, row_stride, keys, hashes, offsets, slopes, inverse_temperature, noise_scale, border, last_id,
    tokens, logprobs, policy_logprobs, V, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse_temperature + row)
    scale = tl.load(noise_scale + row)
    border_value = tl.load(border + row)
    border_id = tl.load(last_id + row)
    key_0, key_1 = load_keys(keys, row)
    best, token, drawn = float("-inf"), 0, float("-inf")
    # from a finite maximum, exp(-inf - maximum) is 0 also where a whole block is masked
    maximum = tl.full((), _LOWEST, tl.float32)
    total, kept_total = 0.0, 0.0
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        inside = ids < V
        scaled = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        kept = (scaled > border_value) | ((scaled == border_value) & (ids <= border_id))
        kept = kept & inside

        new_maximum = tl.maximum(maximum, tl.max(scaled, 0))
        rescale = tl.exp(maximum - new_maximum)
        weights = tl.exp(scaled - new_maximum)
        total = total * rescale + tl.sum(weights, 0)
        kept_total = kept_total * rescale + tl.sum(tl.where(kept, weights, 0.0), 0)
        maximum = new_maximum

        token_hashes = tl.load(hashes + ids, mask=inside, other=0).to(tl.uint32, bitcast=True)
        noise = gumbel(token_hashes, key_0, key_1, offsets, slopes)
        perturbed = tl.where(kept, scaled + noise * scale, float("-inf"))
        block_best = tl.max(perturbed, 0)
        winner = tl.min(tl.where(perturbed == block_best, ids, V), 0)
        better = block_best > best
        best = tl.where(better, block_best, best)
        token = tl.where(better, winner, token)
        drawn = tl.where(better, tl.sum(tl.where(ids == winner, scaled, 0.0), 0), drawn)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, drawn - maximum - tl.log(kept_total))
    tl.store(policy_logprobs + row, drawn - maximum - tl.log(total))


def prepare(logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, sampling: RowSampling) -> tuple[Launch, Draw]:
    """logits float32, bfloat16 or float16, their rows contiguous."""
    assert logits_NV.stride(-1) == 1, "rows must be contiguous"
    (N, V), device = logits_NV.shape, logits_NV.device
    drawn = Draw(torch.empty(N, dtype=torch.int64, device=device), *(torch.empty(N, device=device) for _ in range(2)))
    border = _border(logits_NV, sampling)
    offsets, slopes = gumbel_table(device)
    pointers = {
        "logits": logits_NV,
        "keys": keys_N2.contiguous(),
        "hashes": hashes_V,
        "offsets": offsets,
        "slopes": slopes,
        "inverse_temperature": sampling.inverse_temperature_N1.float().contiguous(),
        "noise_scale": sampling.noise_scale_N1.float().contiguous(),
        "border": border.values_N,
        "last_id": border.last_ids_N,
        "tokens": drawn.tokens_N,
        "logprobs": drawn.logprobs_N,
        "policy_logprobs": drawn.policy_logprobs_N,
    }
    numbers = {"row_stride": logits_NV.stride(0), "V": V}
    return Launch(draw_kernel, (N,), pointers | numbers, {"BLOCK": BLOCK}, WARPS), drawn


def _border(logits_NV: Tensor, sampling: RowSampling) -> Border:
    N, V = logits_NV.shape
    if sampling.top_k_N is None or sampling.top_p_N is None:
        everything_N = torch.full((N,), float("-inf"), device=logits_NV.device)
        return Border(everything_N, torch.full((N,), V, dtype=torch.int32, device=logits_NV.device))
    scaled_NV = logits_NV.float() * sampling.inverse_temperature_N1
    return filter_border(scaled_NV, sampling.top_k_N, sampling.top_p_N)


def draw(logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, sampling: RowSampling) -> Draw:
    launch, drawn = prepare(logits_NV, keys_N2, hashes_V, sampling)
    launch.run()
    return drawn
