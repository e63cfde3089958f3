"""One program a row walks down from the root.

Shapes: B = rows, N = proposed tokens a row, W = 1 + N nodes, E = depth + 1.
"""

import numpy as np
import torch
from torch import Tensor

from tlt_kernels.gateway import Launch, jit, next_power_of_2, tl
from tlt_pipeline.engine.proposals import Accepted, Proposals


@jit
def accept_kernel(proposals, parents, draws, path, counts, N, E, PLACES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PLACES)
    inside = columns < N
    tokens = tl.load(proposals + row * N + columns, mask=inside, other=-1)
    above = tl.load(parents + row * N + columns, mask=inside, other=-1)
    nodes = tl.full((PLACES,), 0, tl.int32)  # filled up with the root

    count = 0
    drawn = tl.load(draws + row * (N + 1))
    node = tl.min(tl.where((above == 0) & (tokens == drawn), columns, PLACES), 0) + 1
    while node <= PLACES:
        count += 1
        nodes = tl.where(columns == count, node, nodes)
        drawn = tl.load(draws + row * (N + 1) + node)
        node = tl.min(tl.where((above == node) & (tokens == drawn), columns, PLACES), 0) + 1
    tl.store(path + row * E + columns, nodes, mask=columns < E)
    tl.store(counts + row, count)


def prepare(proposals: Proposals, draws_BW: Tensor) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """-> paths int32 [B, E], the root first, and how many proposals were accepted, int32 [B]."""
    (B, N), device = proposals.tokens_BN.shape, draws_BW.device
    path_BE = torch.empty(B, proposals.depth + 1, dtype=torch.int32, device=device)
    counts_B = torch.empty(B, dtype=torch.int32, device=device)
    pointers = {
        "proposals": proposals.tokens_BN.contiguous(),
        "parents": _parents(proposals).to(device),
        "draws": draws_BW.contiguous(),
        "path": path_BE,
        "counts": counts_B,
    }
    constants = {"PLACES": next_power_of_2(N + 1)}
    return Launch(accept_kernel, (B,), {**pointers, "N": N, "E": proposals.depth + 1}, constants, warps=1), (
        path_BE,
        counts_B,
    )


def _parents(proposals: Proposals) -> Tensor:
    """int32 [B, N]."""
    if proposals.tree is not None:
        return torch.from_numpy(proposals.tree.parents_BN.astype(np.int32))
    B, N = proposals.tokens_BN.shape
    return torch.arange(N, dtype=torch.int32).repeat(B, 1)


def tree_accept(proposals: Proposals, draws_BW: Tensor) -> Accepted:
    launch, (path_BE, counts_B) = prepare(proposals, draws_BW)
    launch.run()
    found_BM = torch.cat([path_BE, counts_B.unsqueeze(1)], 1).cpu().numpy().astype(np.int64)
    return Accepted(found_BM[:, :-1], found_BM[:, -1])
