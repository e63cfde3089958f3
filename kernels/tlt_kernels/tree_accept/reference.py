"""A child is accepted exactly if it is the policy's draw at its parent (design 5.1). Siblings are distinct, so the
accepted nodes are one path from the root; the draw at its end is the *bonus* token.

Shapes: B = rows, N = proposed nodes, M = N + 1. Node 0 is the root, the last committed token; node i is column i - 1 of
the proposals.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    nodes_BN: Tensor
    """int32: the accepted nodes along the path, root excluded, then -1."""
    counts_B: Tensor
    """int32: how many."""
    bonus_B: Tensor
    """int64."""


def tree_accept(proposals_BN: Tensor, parents_BN: Tensor, draws_BM: Tensor) -> Accepted:
    """proposals int64; parents int32, the node a proposal hangs on, before its children, -1 where a row has no node;
    draws int64 [B, N + 1], the policy's draw at every node, the root first."""
    B, N = proposals_BN.shape
    rows_B = torch.arange(B, device=proposals_BN.device)
    nodes_BN = torch.full((B, N), -1, dtype=torch.int32, device=proposals_BN.device)
    counts_B = torch.zeros(B, dtype=torch.int64, device=proposals_BN.device)
    node_B = torch.zeros_like(counts_B)
    going_B = torch.ones_like(counts_B, dtype=torch.bool)
    for depth in range(N):
        drawn_B = draws_BM[rows_B, node_B]
        accepted_BN = (parents_BN == node_B[:, None]) & (proposals_BN == drawn_B[:, None]) & going_B[:, None]
        going_B = accepted_BN.any(-1)
        node_B = torch.where(going_B, accepted_BN.int().argmax(-1) + 1, node_B)
        nodes_BN[:, depth] = torch.where(going_B, node_B, -1).int()
        counts_B += going_B
    return Accepted(nodes_BN, counts_B.int(), draws_BM[rows_B, node_B])
