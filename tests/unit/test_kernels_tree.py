"""Tree acceptance and KV compaction, against the published cases and against plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import on_every_device
from tlt_kernels import dispatch
from tlt_kernels.dispatch import Path as KernelPath
from tlt_pipeline.engine.proposals import Proposals, Tree, accept

VECTORS = json.loads((Path(__file__).parents[1] / "data/tree_verify_greedy.json").read_text())["cases"]
both_paths = pytest.mark.parametrize("path", ["reference", "triton"])


def random_trees(rows: int, nodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Proposals with distinct siblings, parents, and draws that often are one of the children. Some rows have fewer
    nodes."""
    rng = np.random.default_rng(seed)
    proposals, parents = np.zeros((rows, nodes), np.int64), np.full((rows, nodes), -1, np.int32)
    draws = rng.integers(0, 50, (rows, nodes + 1))
    for row in range(rows):
        used = nodes if row % 3 else rng.integers(0, nodes + 1)
        parents[row, :used] = [rng.integers(max(0, i - 3), i + 1) for i in range(used)]
        for node in range(nodes + 1):
            children = np.flatnonzero(parents[row] == node)
            proposals[row, children] = rng.permutation(50)[: len(children)]
            if len(children) and rng.random() < 0.8:
                draws[row, node] = proposals[row, rng.choice(children)]
    return torch.from_numpy(proposals), torch.from_numpy(parents), torch.from_numpy(draws)


def walk(proposals: list[int], parents: list[int], draws: list[int]) -> tuple[list[int], int]:
    path, node = [], 0
    while True:
        children = [i + 1 for i, parent in enumerate(parents) if parent == node and proposals[i] == draws[node]]
        if not children:
            return path, draws[node]
        (node,) = children
        path.append(node)


@on_every_device
@both_paths
@pytest.mark.parametrize("case", VECTORS, ids=["deep", "forked"])
def test_published_cases(device: str, path: KernelPath, case: dict[str, list[int]]):
    # there a parent of -1 is the root's, and node 0 the root
    proposals, parents, draws = case["tokens"][1:], case["parent"][1:], case["target_argmax"]
    accepted = dispatch.tree_accept(
        *(torch.tensor([part], device=device) for part in (proposals, parents, draws)), path
    )
    count = int(accepted.counts_B)
    nodes = accepted.nodes_BN[0].tolist()
    assert nodes == case["accepted"] + [-1] * (len(nodes) - count)
    assert [proposals[node - 1] for node in nodes[:count]] + accepted.bonus_B.tolist() == case["committed"]


@on_every_device
@both_paths
@pytest.mark.parametrize("nodes", [1, 2, 7, 16, 48])
def test_random_trees(device: str, path: KernelPath, nodes: int):
    trees = random_trees(24, nodes, seed=nodes)
    accepted = dispatch.tree_accept(*(part.to(device) for part in trees), path)
    for row, (proposals, parents, draws) in enumerate(zip(*(part.tolist() for part in trees), strict=True)):
        expected, bonus = walk(proposals, parents, draws)
        assert accepted.nodes_BN[row].tolist() == expected + [-1] * (nodes - len(expected))
        assert (int(accepted.counts_B[row]), int(accepted.bonus_B[row])) == (len(expected), bonus)


@on_every_device
def test_the_engine_accepts_the_same(device: str):
    proposals, parents, draws = (part[1::3] for part in random_trees(24, 16, seed=1))  # rows with all their nodes
    tree = Tree.of(parents.numpy().astype(np.int64))
    expected = accept(Proposals(proposals, int(tree.depths_BW.max()), np.full(8, 16), tree), draws.numpy())
    assert expected.counts_B.max() >= 3
    accepted = dispatch.tree_accept(proposals.to(device), parents.to(device), draws.to(device), path="triton")
    assert accepted.counts_B.tolist() == expected.counts_B.tolist()
    for row, count in enumerate(expected.counts_B):
        assert accepted.nodes_BN[row, :count].tolist() == expected.path_BD[row, 1 : count + 1].tolist()


@on_every_device
@both_paths
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"), [(2, 5, torch.float32), (3, 64, torch.bfloat16), (9, 128, torch.bfloat16)]
)
def test_compaction(device: str, path: KernelPath, heads: int, head_size: int, dtype: torch.dtype):
    rows, nodes = 6, 10
    accepted = dispatch.tree_accept(*random_trees(rows, nodes, seed=5), path="reference")
    lengths = torch.tensor([1, 3, 7, 20, 11, 30])
    cache = torch.randn(2, 2, rows + 1, 40, heads, head_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = cache.clone()
    for row, (length, count) in enumerate(zip(lengths.tolist(), accepted.counts_B.tolist(), strict=True)):
        for rank, node in enumerate(accepted.nodes_BN[row, :count].tolist()):
            expected[:, :, row, length + rank] = cache[:, :, row, length + node - 1]
    moved = cache.to(device)
    arguments = (part.to(device) for part in (lengths, accepted.nodes_BN, accepted.counts_B))
    dispatch.kv_compact(moved, *arguments, path)
    assert accepted.counts_B.max() >= 3
    assert torch.equal(moved.cpu(), expected)
