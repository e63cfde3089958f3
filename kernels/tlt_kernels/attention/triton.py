"""One program a query token and key/value head. Keys are reduced in blocks of 64 tokens counted from the start of the
answer, in order: a query's bits depend on its answer alone, not on the batch, the cache's length, or other queries.
Decoding and trees run the same compiled code: P, the number of named slots, is a plain number to it.

Shapes: see the reference. A program's tile has the G query heads that share a key/value head, padded to 16.
"""

import math

import torch
from torch import Tensor

from tlt_kernels.gateway import Launch, dot, jit_generic, next_power_of_2, tl

BLOCK, WARPS = 64, 8
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@jit_generic("P")
def attention_kernel(
    q, keys, values, rows, lengths, paths, since, out, row_stride, head_stride, heads, scale, P,
    G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group, columns, places = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    q_tile = ((query * heads + head) * G + group)[:, None] * D + columns[None, :]
    q_mask = (group < G)[:, None] & (columns < D)[None, :]
    query_heads = tl.load(q + q_tile, mask=q_mask, other=0.0)
    length = tl.load(lengths + query)
    oldest = tl.load(since + query)
    start = tl.load(rows + query).to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    maximum = tl.full((HEADS,), _LOWEST, tl.float32)
    total = tl.full((HEADS,), 0.0, tl.float32)
    mixed = tl.full((HEADS, WIDTH), 0.0, tl.float32)
    for first in range(oldest // BLOCK * BLOCK, length, BLOCK):
        tokens = first + places
        seen = (tokens < length) & (tokens >= oldest)
        on_path = tokens - (length - P)
        named = tl.load(paths + query * P + on_path, mask=seen & (on_path >= 0), other=0)
        slots = tl.where(on_path >= 0, named, tokens)
        tile = start + slots.to(tl.int64)[:, None] * D + columns[None, :]
        mask = seen[:, None] & (columns < D)[None, :]
        block_keys = tl.load(keys + tile, mask=mask, other=0.0)
        block_values = tl.load(values + tile, mask=mask, other=0.0)

        scores = dot(query_heads, tl.trans(block_keys), tl.full((HEADS, BLOCK), 0.0, tl.float32)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum[:, None])
        total = total * rescale + tl.sum(weights, 1)
        mixed = dot(weights.to(block_values.dtype), block_values, mixed * rescale[:, None])
        maximum = new_maximum
    mixed = mixed / total[:, None]
    tl.store(out + q_tile, mixed.to(out.dtype.element_ty), mask=q_mask)


def prepare(
    q_NHD: Tensor,
    keys_RKLD: Tensor,
    values_RKLD: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    paths_NP: Tensor,
    since_N: Tensor,
) -> tuple[Launch, Tensor]:
    assert keys_RKLD.stride() == values_RKLD.stride() and keys_RKLD.stride()[2:] == (keys_RKLD.shape[3], 1)
    (N, H, D), K = q_NHD.shape, keys_RKLD.shape[1]
    out_NHD = torch.empty(N, H, D, dtype=q_NHD.dtype, device=q_NHD.device)
    pointers = {
        "q": q_NHD.contiguous(),
        "keys": keys_RKLD,
        "values": values_RKLD,
        "rows": rows_N.contiguous(),
        "lengths": lengths_N.contiguous(),
        "paths": paths_NP.contiguous(),
        "since": since_N.contiguous(),
        "out": out_NHD,
    }
    numbers = {
        "row_stride": keys_RKLD.stride(0),
        "head_stride": keys_RKLD.stride(1),
        "heads": K,
        "scale": 1 / math.sqrt(D),
        "P": paths_NP.shape[1],
    }
    constants = {
        "G": H // K,
        "D": D,
        "HEADS": max(16, next_power_of_2(H // K)),
        "WIDTH": max(16, next_power_of_2(D)),
        "BLOCK": BLOCK,
    }
    return Launch(attention_kernel, (N, K), pointers | numbers, constants, WARPS), out_NHD


def attention(
    q_NHD: Tensor,
    keys_RKLD: Tensor,
    values_RKLD: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    paths_NP: Tensor,
    since_N: Tensor,
) -> Tensor:
    launch, out_NHD = prepare(q_NHD, keys_RKLD, values_RKLD, rows_N, lengths_N, paths_NP, since_N)
    launch.run()
    return out_NHD
