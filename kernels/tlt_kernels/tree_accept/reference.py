"""Shapes: B = rows, W = nodes a row, the root (the last committed token) first."""

from __future__ import annotations

from torch import Tensor

from tlt_pipeline.engine.proposals import Accepted, Proposals, accept


def tree_accept(proposals: Proposals, draws_BW: Tensor) -> Accepted:
    """`engine.proposals.accept`; draws int64, the policy's at every node. What follows a path is filled up with nodes
    that may differ from path to path (kernel or not)."""
    return accept(proposals, draws_BW.cpu().numpy())
