"""One program a row, layer and keys or values, and head; it moves the path's slots one after another, so overlap does
no harm.

Shapes: see the reference.
"""

from torch import Tensor

from tlt_kernels.gateway import Launch, jit, next_power_of_2, tl


@jit
def compact_kernel(data, lengths, nodes, counts, rows, heads, slots, width, places, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    length = tl.load(lengths + row).to(tl.int64)
    count = tl.load(counts + row)
    head = (tl.program_id(1).to(tl.int64) * rows + row) * heads + tl.program_id(2)
    root = data + (head * slots + length) * width + columns
    for rank in range(count):
        node = tl.load(nodes + row * places + rank).to(tl.int64)
        moved = tl.load(root + node * width, mask=inside)
        tl.store(root + (rank + 1) * width, moved, mask=inside)


def prepare(data_A2RHLD: Tensor, lengths_B: Tensor, nodes_BP: Tensor, counts_B: Tensor) -> Launch:
    assert data_A2RHLD.is_contiguous(), "a view of the cache would be copied, and the copy changed"
    layers, two, rows, heads, slots, head_size = data_A2RHLD.shape
    pointers = {
        "data": data_A2RHLD,
        "lengths": lengths_B.contiguous(),
        "nodes": nodes_BP.contiguous(),
        "counts": counts_B.contiguous(),
    }
    numbers = {"rows": rows, "heads": heads, "slots": slots, "width": head_size, "places": nodes_BP.shape[1]}
    grid = (len(lengths_B), layers * two, heads)
    return Launch(compact_kernel, grid, pointers | numbers, {"WIDTH": next_power_of_2(head_size)}, warps=1)


def kv_compact(data_A2RHLD: Tensor, lengths_B: Tensor, nodes_BP: Tensor, counts_B: Tensor) -> None:
    prepare(data_A2RHLD, lengths_B, nodes_BP, counts_B).run()
