"""Shapes: N = queries (tokens), H = query heads, K = key/value heads, G = H / K, D = head size, R = rows of the cache,
L = its length, P = longest path."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q_NHD: Tensor,
    keys_RKLD: Tensor,
    values_RKLD: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    paths_NP: Tensor,
    since_N: Tensor,
) -> Tensor:
    """-> [N, H, D]: each query looks at the first `lengths` (int32) tokens of its answer, its own the last of them,
    from token `since` (int32, less than the length) on, in the cache row `rows` (int32). The last P of those tokens, or
    all of a shorter answer, stand in the slots that `paths` (int32) names, oldest first and right-aligned; the ones
    before at their own position. So a node of a draft tree is laid out along its path, as decoding would have it."""
    (H, D), K = q_NHD.shape[1:], keys_RKLD.shape[1]
    precise = torch.promote_types(q_NHD.dtype, torch.float32)
    out_NHD = torch.empty_like(q_NHD)
    for n in range(len(q_NHD)):
        row, slots_T = rows_N[n], _slots(int(lengths_N[n]), paths_NP[n], q_NHD.device)[int(since_N[n]) :]
        q_KGD = q_NHD[n].view(K, H // K, D).to(precise)
        keys_KTD = keys_RKLD[row].to(precise)[:, slots_T]
        values_KTD = values_RKLD[row].to(precise)[:, slots_T]
        weights_KGT = torch.softmax(q_KGD @ keys_KTD.transpose(1, 2) / math.sqrt(D), -1)
        out_NHD[n] = (weights_KGT @ values_KTD).view(H, D)
    return out_NHD


def _slots(length: int, path_P: Tensor, device: torch.device) -> Tensor:
    """Where the tokens of an answer stand, [T]."""
    slots_T = torch.arange(length, device=device)
    named = min(length, len(path_P))
    slots_T[length - named :] = path_P[len(path_P) - named :]
    return slots_T
