"""What the policy's draws accept of a proposed tree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tlt_pipeline.engine.proposals import Proposals, Tree, accept, chain_proposals, pad_chains

CASES = json.loads((Path(__file__).parents[1] / "data" / "tree_verify_greedy.json").read_text())["cases"]


def proposals_of(tokens: list[list[int]], parents: list[list[int]]) -> Proposals:
    tree = Tree.of(np.array(parents))
    return Proposals(torch.tensor(tokens), int(tree.depths_BW.max()), np.full(len(tokens), len(tokens[0])), tree)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["committed"]))
def test_reference_cases(case: dict) -> None:
    # the cases of another implementation; the root is node 0 there as well
    proposals = proposals_of([case["tokens"][1:]], [case["parent"][1:]])
    drawn_BW = np.array([case["target_argmax"]])
    accepted = accept(proposals, drawn_BW)
    count = int(accepted.counts_B[0])
    path = accepted.path_BD[0, : count + 1].tolist()
    assert [case["tokens"][node] for node in path[1:]] == case["committed"][:-1]
    assert path[1:] == case["accepted"]
    assert drawn_BW[0, path].tolist() == case["committed"]


def walk(tokens: list[int], parents: list[int], drawn: list[int]) -> list[int]:
    """The same, node by node."""
    path = [0]
    while True:
        children = [node for node in range(1, len(tokens) + 1) if parents[node - 1] == path[-1]]
        agreeing = [node for node in children if tokens[node - 1] == drawn[path[-1]]]
        if not agreeing:
            return path
        path += agreeing


def random_tree(generator: np.random.Generator, nodes: int, vocabulary: int) -> tuple[list[int], list[int]]:
    """Breadth first, siblings distinct."""
    depths, parents, tokens = [0], [], []
    while len(tokens) < nodes:
        parent = int(generator.integers(max(0, len(depths) - 4), len(depths)))
        token = int(generator.integers(vocabulary))
        siblings = [tokens[node] for node in range(len(tokens)) if parents[node] == parent]
        if token in siblings or depths[parent] + 1 < depths[-1]:
            continue
        parents.append(parent)
        tokens.append(token)
        depths.append(depths[parent] + 1)
    return tokens, parents


def test_random_trees_against_a_walk() -> None:
    generator = np.random.default_rng(0)
    longest = 0
    for _ in range(200):
        rows = [random_tree(generator, 9, 3) for _ in range(3)]
        proposals = proposals_of([tokens for tokens, _ in rows], [parents for _, parents in rows])
        drawn_BW = generator.integers(0, 3, (3, 10))
        accepted = accept(proposals, drawn_BW)
        for row, (tokens, parents) in enumerate(rows):
            expected = walk(tokens, parents, drawn_BW[row].tolist())
            assert accepted.path_BD[row, : accepted.counts_B[row] + 1].tolist() == expected
            longest = max(longest, len(expected))
    assert longest > 4


def test_a_chain_is_the_tree_without_branches() -> None:
    generator = np.random.default_rng(1)
    tokens_BN = generator.integers(0, 2, (200, 5))
    drawn_BW = generator.integers(0, 2, (200, 6))
    tree = Tree.of(np.broadcast_to(np.arange(5), tokens_BN.shape))
    chain = chain_proposals(torch.from_numpy(tokens_BN))
    same = Proposals(chain.tokens_BN, chain.depth, chain.counts_B, tree)
    as_chain, as_tree = accept(chain, drawn_BW), accept(same, drawn_BW)
    assert as_chain.counts_B.tolist() == as_tree.counts_B.tolist()
    assert as_chain.counts_B.max() == 5
    assert (chain.depths(200) == same.depths(200)).all()


def test_no_proposals_accept_nothing_and_commit_the_root() -> None:
    accepted = accept(None, np.array([[4], [7]]))
    assert accepted.counts_B.tolist() == [0, 0]
    assert accepted.path_BD.tolist() == [[0], [0]]


def test_ancestors_and_leaves() -> None:
    #      0
    #    1   2
    #   3 4   5
    tree = Tree.of(np.array([[0, 0, 1, 1, 2]]))
    assert tree.depths_BW.tolist() == [[0, 1, 1, 2, 2, 2]]
    assert tree.ancestors(2)[0].tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]
    assert tree.leaves()[0].tolist() == [False, False, False, True, True, True]


def test_chains_of_unlike_lengths_are_filled_up() -> None:
    device = torch.device("cpu")
    assert pad_chains([[], []], device) is None
    padded = pad_chains([[5, 6], [], [7]], device)
    assert padded is not None
    assert (padded.depth, padded.counts_B.tolist()) == (2, [2, 0, 1])
    assert padded.tokens_BN.tolist() == [[5, 6], [0, 0], [7, 0]]
