"""Shapes: A = layers, R = rows of the cache, H = key/value heads, L = its length, D = head size, B = running rows (the
first ones), P = longest path."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_compact(data_A2RHLD: Tensor, lengths_B: Tensor, nodes_BP: Tensor, counts_B: Tensor) -> None:
    """In place: a tree's node i (0: the root) stands at slot length + i of its row; the first `counts` nodes of a path,
    the root excluded, move to the slots from length + 1 on. The nodes of a path grow, so no target lies behind its
    source, and none on a source still to be read. What stands behind the path then means nothing."""
    ranks_P = torch.arange(nodes_BP.shape[1], device=nodes_BP.device)
    rows_M, ranks_M = (ranks_P < counts_B[:, None]).nonzero(as_tuple=True)
    targets_M = lengths_B[rows_M].long() + ranks_M + 1
    sources_M = lengths_B[rows_M].long() + nodes_BP[rows_M, ranks_M]
    data_A2RLHD = data_A2RHLD.transpose(3, 4)
    data_A2RLHD[:, :, rows_M, targets_M] = data_A2RLHD[:, :, rows_M, sources_M]
