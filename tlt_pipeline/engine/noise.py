"""Counter-based Gumbel noise: a pure function of (seed, absolute position, token id).

Sampling is Gumbel-max: token = argmax(logits / T + g). Since g depends on nothing else, whoever computes it (policy or
drafter, alone or in a batch, before or after a crash) gets the same noise, so a draw can be repeated anywhere
(design 5.1; Daliri, Musco, Suresh, arXiv 2408.07978). Integer steps are exact on every device.
Shapes: N = rows, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_pipeline.engine.gumbel_table import SEGMENTS, SHIFT, gumbel_table

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TOKEN_STEP = 0x9E3779B1
_HASH_A, _HASH_B = 0x7FEB352D, 0x846CA68B  # the "lowbias32" multipliers

_CHUNK = 1 << 17
"""Values computed at once on a CPU: what is in between stays in its cache."""


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> Tensor:
    """seeds, positions (of the token to draw) [N] -> two 32-bit keys a row, int32 [N, 2]."""
    with np.errstate(over="ignore"):
        mixed = _mix64(_mix64(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return torch.from_numpy(mixed.view(np.int32).reshape(-1, 2))


def token_hashes(vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """The token id's share of the hash, once a model: int32 [V]."""
    ids = np.arange(vocab_size, dtype=np.uint64) * np.uint64(_TOKEN_STEP)
    return torch.from_numpy(ids.astype(np.uint32).view(np.int32)).to(device)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >>> bits), in place; the mask makes int32's arithmetic shift a logical one."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def gumbel_noise(keys: Tensor, hashes: Tensor) -> Tensor:
    """keys int32 [N, 2], hashes int32 [V] -> standard Gumbel noise, float32 [N, V], always finite. Its bits are the
    same on every device: the hash is integer arithmetic, and the rest as `gumbel_table` says."""
    table = gumbel_table(keys.device)
    rows = max(1, _CHUNK // len(hashes))
    if len(keys) <= rows or keys.is_cuda:
        return _noise(keys, hashes, *table)
    noise_NV = torch.empty(len(keys), len(hashes))
    for part_keys, part in zip(keys.split(rows), noise_NV.split(rows), strict=True):
        _noise(part_keys, hashes, *table, out=part)
    return noise_NV


def _noise(keys: Tensor, hashes: Tensor, offsets: Tensor, slopes: Tensor, out: Tensor | None = None) -> Tensor:
    """The hash is "lowbias32" without its last step, which leaves the high bits as they are."""
    x = hashes + keys[:, :1]
    _xor_shift(x, 16).mul_(_HASH_A).bitwise_xor_(keys[:, 1:])
    x = _xor_shift(x, 15).mul_(_signed(_HASH_B)).to(torch.float32)
    segments = (x.view(torch.int32) >> SHIFT).bitwise_and_(SEGMENTS - 1).view(-1)
    slope, offset = torch.index_select(slopes, 0, segments), torch.index_select(offsets, 0, segments)
    return torch.add(slope.view_as(x).mul_(x), offset.view_as(x), out=out)
