"""One program a row walks down from the root. Shapes: see the reference; M = N + 1 nodes with the root."""

import torch
from torch import Tensor

from tlt_kernels.gateway import Launch, jit, next_power_of_2, tl
from tlt_kernels.tree_accept.reference import Accepted


@jit
def accept_kernel(proposals, parents, draws, nodes, counts, bonus, N, PLACES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PLACES)
    inside = columns < N
    tokens = tl.load(proposals + row * N + columns, mask=inside, other=-1)
    above = tl.load(parents + row * N + columns, mask=inside, other=-1)
    path = tl.full((PLACES,), -1, tl.int32)

    count = 0
    drawn = tl.load(draws + row * (N + 1))
    node = tl.min(tl.where((above == 0) & (tokens == drawn), columns, PLACES), 0) + 1
    while node <= PLACES:
        path = tl.where(columns == count, node, path)
        count += 1
        drawn = tl.load(draws + row * (N + 1) + node)
        node = tl.min(tl.where((above == node) & (tokens == drawn), columns, PLACES), 0) + 1
    tl.store(nodes + row * N + columns, path, mask=inside)
    tl.store(counts + row, count)
    tl.store(bonus + row, drawn)


def prepare(proposals_BN: Tensor, parents_BN: Tensor, draws_BM: Tensor) -> tuple[Launch, Accepted]:
    (B, N), device = proposals_BN.shape, proposals_BN.device
    accepted = Accepted(
        torch.empty(B, N, dtype=torch.int32, device=device),
        torch.empty(B, dtype=torch.int32, device=device),
        torch.empty(B, dtype=torch.int64, device=device),
    )
    pointers = {
        "proposals": proposals_BN.contiguous(),
        "parents": parents_BN.contiguous(),
        "draws": draws_BM.contiguous(),
        "nodes": accepted.nodes_BN,
        "counts": accepted.counts_B,
        "bonus": accepted.bonus_B,
    }
    return Launch(accept_kernel, (B,), {**pointers, "N": N}, {"PLACES": next_power_of_2(N)}, warps=1), accepted


def tree_accept(proposals_BN: Tensor, parents_BN: Tensor, draws_BM: Tensor) -> Accepted:
    launch, accepted = prepare(proposals_BN, parents_BN, draws_BM)
    launch.run()
    return accepted
