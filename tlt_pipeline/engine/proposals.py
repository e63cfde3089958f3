"""What a drafter proposes, as a tree of tokens a row, and which of it the policy's draws accept.

Node 0 is the last committed token (the root); node i is the i-th proposed token. Parents come before their children,
shallow nodes before deep ones, siblings differ. A chain is a tree in which node i's parent is node i - 1.
Shapes: B = running rows, N = proposed tokens a row, W = 1 + N nodes, D = depth, P = paths of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Proposals:
    """tokens_BN: proposed tokens; `depth`: of the deepest. `counts_B`: how many of a row's tokens were meant (others
    fill up a row for which there was less to propose; accepting one of those would still be right). `tree`: None for
    chains."""

    tokens_BN: Tensor
    depth: int
    counts_B: Ints
    tree: Tree | None = None

    @property
    def nodes(self) -> int:
        """W: nodes a row, the root included."""
        return 1 + self.tokens_BN.shape[1]

    def depths(self, batch: int) -> Ints:
        """[B, W]: how deep each node stands; the root at 0."""
        if self.tree is None:
            return np.broadcast_to(np.arange(self.nodes), (batch, self.nodes))
        return self.tree.depths_BW


@dataclass(frozen=True)
class Tree:
    """parents_BN: the parent node of each proposed token (0: the root)."""

    parents_BN: Ints
    depths_BW: Ints

    @classmethod
    def of(cls, parents_BN: Ints) -> Tree:
        B, N = parents_BN.shape
        depths_BW = np.zeros((B, N + 1), np.int64)
        rows = np.arange(B)
        for column in range(N):
            depths_BW[:, column + 1] = depths_BW[rows, parents_BN[:, column]] + 1
        return cls(parents_BN, depths_BW)

    def ancestors(self, depth: int) -> Ints:
        """[B, W, D + 1]: the nodes on the way from the root to each node, itself included, by depth; a node's own
        number fills up what is deeper."""
        B, W = self.depths_BW.shape
        above_BWD = np.broadcast_to(np.arange(W)[None, :, None], (B, W, depth + 1)).copy()
        above_BWD[:, 0] = 0
        rows = np.arange(B)
        for node in range(1, W):
            parent_B, depth_B = self.parents_BN[:, node - 1], self.depths_BW[:, node]
            inherited_BD = above_BWD[rows, parent_B]
            deeper_BD = np.arange(depth + 1)[None, :] >= depth_B[:, None]
            above_BWD[:, node] = np.where(deeper_BD, node, inherited_BD)
        return above_BWD

    def leaves(self) -> NDArray[np.bool_]:
        """[B, W]: nodes without children."""
        B, W = self.depths_BW.shape
        leaves_BW = np.ones((B, W), np.bool_)
        leaves_BW[np.arange(B)[:, None], self.parents_BN] = False
        return leaves_BW


@dataclass(frozen=True)
class Accepted:
    """`path_BD`: the nodes whose draws are committed, root first [B, D + 1]; `counts_B`: how many proposals were
    accepted, so that 1 + counts_B draws count. What follows them in the path is filling."""

    path_BD: Ints
    counts_B: Ints


def accept(proposals: Proposals | None, drawn_BW: Ints) -> Accepted:
    """drawn_BW: the policy's draw at every node. A proposed token is accepted exactly if it is the draw at its parent
    and its parent was accepted (design 5.1; EAGLE-2, arXiv 2406.16858, section 4.2, with draws for probabilities).
    Since siblings differ, what is accepted is one path."""
    B = len(drawn_BW)
    if proposals is None:
        return Accepted(np.zeros((B, 1), np.int64), np.zeros(B, np.int64))
    tokens_BN = proposals.tokens_BN.cpu().numpy()
    if proposals.tree is None:
        counts_B = (drawn_BW[:, :-1] == tokens_BN).cumprod(1).sum(1)
        return Accepted(np.broadcast_to(np.arange(proposals.nodes), drawn_BW.shape), counts_B)
    parents_BN = proposals.tree.parents_BN
    agrees_BN = np.take_along_axis(drawn_BW, parents_BN, 1) == tokens_BN
    reached_BW = np.zeros(drawn_BW.shape, np.bool_)
    reached_BW[:, 0] = True
    rows = np.arange(B)
    for column in range(parents_BN.shape[1]):
        reached_BW[:, column + 1] = agrees_BN[:, column] & reached_BW[rows, parents_BN[:, column]]
    order_BW = np.argsort(~reached_BW, axis=1, kind="stable")
    return Accepted(order_BW[:, : proposals.depth + 1], reached_BW.sum(1) - 1)


def chain_proposals(tokens_BD: Tensor, counts_B: Ints | None = None) -> Proposals:
    """`counts_B`: None: all of them."""
    B, depth = tokens_BD.shape
    return Proposals(tokens_BD, depth, np.full(B, depth) if counts_B is None else counts_B)


def pad_chains(chains: list[list[int]], device: torch.device) -> Proposals | None:
    """Chains of unlike lengths, filled up with token 0; None if there is none at all."""
    counts_B = np.array([len(chain) for chain in chains])
    if not counts_B.any():
        return None
    padded = [chain + [0] * (int(counts_B.max()) - len(chain)) for chain in chains]
    return chain_proposals(torch.tensor(padded, device=device), counts_B)
