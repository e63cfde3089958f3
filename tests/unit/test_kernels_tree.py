"""Tree acceptance and KV compaction, against the published cases and against plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.kernel_cases import on_every_device
from tlt_kernels import dispatch
from tlt_kernels.dispatch import Path as KernelPath
from tlt_pipeline.engine.proposals import Ints, Proposals, Tree, accept, chain_proposals

VECTORS = json.loads((Path(__file__).parents[1] / "data/tree_verify_greedy.json").read_text())["cases"]
both_paths = pytest.mark.parametrize("path", ["reference", "triton"])


def proposed(tokens: Ints, parents: Ints, device: str = "cpu") -> Proposals:
    tree = Tree.of(parents)
    tokens_BN = torch.from_numpy(tokens).to(device)
    return Proposals(tokens_BN, int(tree.depths_BW.max()), (tree.depths_BW > 0).sum(1), tree)


def random_trees(rows: int, nodes: int, seed: int) -> tuple[Ints, Ints, Ints]:
    """Tokens with distinct siblings, parents, and draws that often are one of the children."""
    rng = np.random.default_rng(seed)
    proposals, parents = np.zeros((rows, nodes), np.int64), np.zeros((rows, nodes), np.int64)
    draws = rng.integers(0, 50, (rows, nodes + 1))
    for row in range(rows):
        parents[row] = [rng.integers(max(0, i - 3), i + 1) for i in range(nodes)]
        for node in range(nodes + 1):
            children = np.flatnonzero(parents[row] == node)
            proposals[row, children] = rng.permutation(50)[: len(children)]
            if len(children) and rng.random() < 0.8:
                draws[row, node] = proposals[row, rng.choice(children)]
    return proposals, parents, draws


def walk(proposals: list[int], parents: list[int], draws: list[int]) -> list[int]:
    """The accepted nodes, the root first."""
    path = [0]
    while True:
        children = [i + 1 for i, parent in enumerate(parents) if parent == path[-1] and proposals[i] == draws[path[-1]]]
        if not children:
            return path
        (node,) = children
        path.append(node)


@on_every_device
@both_paths
@pytest.mark.parametrize("case", VECTORS, ids=["deep", "forked"])
def test_published_cases(device: str, path: KernelPath, case: dict[str, list[int]]):
    # there a parent of -1 is the root's, and node 0 the root
    tokens, parents, draws = (np.array([case[name]]) for name in ("tokens", "parent", "target_argmax"))
    accepted = dispatch.tree_accept(
        proposed(tokens[:, 1:], parents[:, 1:], device), torch.from_numpy(draws).to(device), path
    )
    nodes = accepted.path_BD[0, : int(accepted.counts_B[0]) + 1].tolist()
    assert nodes == [0, *case["accepted"]]
    assert draws[0, nodes].tolist() == case["committed"]


@on_every_device
@both_paths
@pytest.mark.parametrize("nodes", [1, 2, 7, 16, 48])
def test_random_trees(device: str, path: KernelPath, nodes: int):
    tokens, parents, draws = random_trees(24, nodes, seed=nodes)
    proposals = proposed(tokens, parents, device)
    accepted = dispatch.tree_accept(proposals, torch.from_numpy(draws).to(device), path)
    assert accepted.path_BD.shape == (24, proposals.depth + 1)
    assert ((accepted.path_BD >= 0) & (accepted.path_BD <= nodes)).all(), "filling is of nodes too"
    for row, parts in enumerate(zip(tokens.tolist(), parents.tolist(), draws.tolist(), strict=True)):
        assert accepted.path_BD[row, : accepted.counts_B[row] + 1].tolist() == walk(*parts)


@on_every_device
def test_chains(device: str):
    rng = np.random.default_rng(0)
    proposals, draws = chain_proposals(torch.from_numpy(rng.integers(0, 2, (32, 4)))), rng.integers(0, 2, (32, 5))
    expected = accept(proposals, draws)
    on_device = chain_proposals(proposals.tokens_BN.to(device))
    accepted = dispatch.tree_accept(on_device, torch.from_numpy(draws).to(device), "triton")
    assert len(set(expected.counts_B.tolist())) > 3
    assert accepted.counts_B.tolist() == expected.counts_B.tolist()
    for row, count in enumerate(accepted.counts_B):
        assert accepted.path_BD[row, : count + 1].tolist() == list(range(count + 1))


@on_every_device
@both_paths
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"), [(2, 5, torch.float32), (3, 64, torch.bfloat16), (9, 128, torch.bfloat16)]
)
def test_compaction(device: str, path: KernelPath, heads: int, head_size: int, dtype: torch.dtype):
    tokens, parents, draws = random_trees(6, 10, seed=5)
    accepted = accept(proposed(tokens, parents), draws)
    lengths = torch.tensor([1, 3, 7, 20, 11, 29])
    cache = torch.randn(2, 2, 6 + 1, heads, 40, head_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = cache.clone()
    for row, (length, count) in enumerate(zip(lengths.tolist(), accepted.counts_B, strict=True)):
        for rank, node in enumerate(accepted.path_BD[row, 1 : count + 1].tolist(), start=1):
            expected[:, :, row, :, length + rank] = cache[:, :, row, :, length + node]
    moved = cache.to(device)
    arguments = lengths, torch.from_numpy(accepted.path_BD[:, 1:]), torch.from_numpy(accepted.counts_B)
    dispatch.kv_compact(moved, *(part.to(device) for part in arguments), path)
    assert accepted.counts_B.max() >= 3
    assert torch.equal(moved.cpu(), expected)
