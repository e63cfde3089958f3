"""One program a row, layer, and keys or values; it moves the path's slots one after another, so overlap does no harm.

Shapes: see the reference.
"""

from torch import Tensor

from tlt_kernels.gateway import Launch, jit, next_power_of_2, tl

MAX_WIDTH = 1024
"""Values of a slot that one program moves."""


@jit
def compact_kernel(data, lengths, nodes, counts, rows, slots, width, places, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    length = tl.load(lengths + row).to(tl.int64)
    count = tl.load(counts + row)
    start = data + ((tl.program_id(1).to(tl.int64) * rows + row) * slots + length) * width + columns
    for rank in range(count):
        node = tl.load(nodes + row * places + rank).to(tl.int64)
        moved = tl.load(start + (node - 1) * width, mask=inside)
        tl.store(start + rank * width, moved, mask=inside)


def prepare(data_A2RLHD: Tensor, lengths_B: Tensor, nodes_BP: Tensor, counts_B: Tensor) -> Launch:
    assert data_A2RLHD.is_contiguous(), "a view of the cache would be copied, and the copy changed"
    layers, two, rows, slots, heads, head_size = data_A2RLHD.shape
    width = heads * head_size
    block = min(next_power_of_2(width), MAX_WIDTH)
    pointers = {
        "data": data_A2RLHD,
        "lengths": lengths_B.contiguous(),
        "nodes": nodes_BP.contiguous(),
        "counts": counts_B.contiguous(),
    }
    numbers = {"rows": rows, "slots": slots, "width": width, "places": nodes_BP.shape[1]}
    grid = (len(lengths_B), layers * two, -(-width // block))
    return Launch(compact_kernel, grid, pointers | numbers, {"WIDTH": block})


def kv_compact(data_A2RLHD: Tensor, lengths_B: Tensor, nodes_BP: Tensor, counts_B: Tensor) -> None:
    prepare(data_A2RLHD, lengths_B, nodes_BP, counts_B).run()
