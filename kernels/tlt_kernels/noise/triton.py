"""The noise as a function that other kernels call, and as a kernel of its own. Shapes: N = rows, V = vocabulary."""

import torch
from torch import Tensor

from tlt_kernels.gateway import Launch, jit, tl
from tlt_pipeline.engine.gumbel_table import SHIFT, gumbel_table

BLOCK = 1024
_SHIFT = tl.constexpr(SHIFT)
_HASH_A, _HASH_B = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)


@jit
def gumbel(hashes, key_0, key_1, offsets, slopes):
    """`tlt_pipeline.engine.noise`, step by step: an integer hash, then a segment of the table.

    hashes uint32 [BLOCK], keys uint32, pointers to the table -> float32 [BLOCK].
    """
    x = hashes + key_0
    x = (x ^ (x >> 16)) * _HASH_A
    x = x ^ key_1
    x = (x ^ (x >> 15)) * _HASH_B
    value = x.to(tl.int32, bitcast=True).to(tl.float32)
    segment = (value.to(tl.uint32, bitcast=True) >> _SHIFT).to(tl.int32)
    return tl.load(slopes + segment) * value + tl.load(offsets + segment)


@jit
def load_keys(keys, row):
    key_0 = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    return key_0, key_1


@jit
def noise_kernel(noise, keys, hashes, offsets, slopes, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    key_0, key_1 = load_keys(keys, row)
    token_hashes = tl.load(hashes + ids, mask=inside, other=0).to(tl.uint32, bitcast=True)
    tl.store(noise + row * V + ids, gumbel(token_hashes, key_0, key_1, offsets, slopes), mask=inside)


def prepare(keys_N2: Tensor, hashes_V: Tensor) -> tuple[Launch, Tensor]:
    N, V = len(keys_N2), len(hashes_V)
    noise_NV = torch.empty(N, V, device=keys_N2.device)
    offsets, slopes = gumbel_table(keys_N2.device)
    pointers = {"noise": noise_NV, "keys": keys_N2.contiguous(), "hashes": hashes_V}
    pointers |= {"offsets": offsets, "slopes": slopes}
    blocks = -(-V // BLOCK)
    return Launch(noise_kernel, (N, blocks), {**pointers, "V": V}, {"BLOCK": BLOCK}), noise_NV


def gumbel_noise(keys_N2: Tensor, hashes_V: Tensor) -> Tensor:
    launch, noise_NV = prepare(keys_N2, hashes_V)
    launch.run()
    return noise_NV
