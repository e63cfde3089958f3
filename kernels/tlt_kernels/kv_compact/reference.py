"""Shapes: A = layers, R = rows of the cache, L = its length, H = key/value heads, D = head size, B = running rows
(the first ones), P = longest path."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_compact(data_A2RLHD: Tensor, lengths_B: Tensor, nodes_BP: Tensor, counts_B: Tensor) -> None:
    """In place: node i of a row (1, 2, ...; 0 is the root) stands at slot length + i - 1, where `lengths` counts the
    slots with the root's; the accepted ones move to the slots from length on. The nodes of a path grow, so no target
    lies behind its source, and none on a source still to be read. What stands behind the path then means nothing."""
    ranks_P = torch.arange(nodes_BP.shape[1], device=nodes_BP.device)
    rows_M, ranks_M = (ranks_P < counts_B[:, None]).nonzero(as_tuple=True)
    targets_M = lengths_B[rows_M].long() + ranks_M
    sources_M = lengths_B[rows_M].long() + nodes_BP[rows_M, ranks_M] - 1
    data_A2RLHD[:, :, rows_M, targets_M] = data_A2RLHD[:, :, rows_M, sources_M]
