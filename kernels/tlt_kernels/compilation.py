"""Compiles every kernel for GPUs that needn't be here: `python -m tlt_kernels.compilation` prints what each one takes.

Compiled for what a 7B policy launches (Qwen2.5-7B's shapes, bfloat16); only types and constants matter, so the tensors
have no memory. Run it in a process of its own, without TRITON_INTERPRET: an interpreted kernel can't be compiled.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tlt_kernels import gateway
from tlt_kernels.gateway import Launch
from tlt_pipeline.engine.proposals import Proposals, Tree
from tlt_pipeline.engine.sampling import RowSampling

CAPABILITIES = (80, 90)
VOCABULARY, HEADS, KV_HEADS, HEAD_SIZE = 151_936, 28, 4, 128
_HEADER = "kernel            sm  warps  registers  spilled bytes  shared bytes\n"


@dataclass(frozen=True)
class Usage:
    """What a program of a compiled kernel takes of a multiprocessor."""

    registers: int
    """A thread's."""
    spilled: int
    """Bytes a thread keeps in memory for want of registers."""
    shared: int
    """Bytes a program."""


def launches() -> dict[str, Launch]:
    from tlt_kernels.attention import triton as attention
    from tlt_kernels.draft_topk import triton as draft_topk
    from tlt_kernels.kv_compact import triton as kv_compact
    from tlt_kernels.matmul import triton as matmul
    from tlt_kernels.noise import triton as noise
    from tlt_kernels.sampling_draw import triton as sampling_draw
    from tlt_kernels.soft_cross_entropy import triton as soft_cross_entropy
    from tlt_kernels.tree_accept import triton as tree_accept

    half = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    ids = partial(torch.empty, dtype=torch.int64, device="meta")
    ints = partial(torch.empty, dtype=torch.int32, device="meta")
    column = torch.empty(8, 1, device="meta")
    rows = (half(8, VOCABULARY), ints(8, 2), ints(VOCABULARY), RowSampling(column, column))
    width = HEADS * HEAD_SIZE
    cache = half(28, 2, 8, KV_HEADS, 4096, HEAD_SIZE)
    tree = Proposals(ids(8, 48), 6, np.full(8, 48), Tree.of(np.zeros((8, 48), np.int64)))
    return {
        "noise": noise.prepare(*rows[1:3])[0],
        "sampling_draw": sampling_draw.prepare(*rows)[0],
        "draft_topk": draft_topk.prepare(*rows, 8)[0],
        "tree_accept": tree_accept.prepare(tree, ids(8, 49))[0],
        "kv_compact": kv_compact.prepare(cache, ids(8), ids(8, 8), ids(8)),
        "soft_cross_entropy": soft_cross_entropy.prepare(rows[0], rows[0], column[:, 0])[0],
        "matmul": matmul.prepare(half(8, width), half(width, width), half(width))[0],
        "matmul float32": matmul.prepare(half(8, width).float(), half(width, width).float())[0],
        "attention": attention.prepare(
            half(8, HEADS, HEAD_SIZE), cache[0, 0], cache[0, 1], ints(8), ints(8), ints(8, 6), ints(8)
        )[0],
    }


def usage_of(compiled: Any) -> Usage:
    """Read from the cubin by NVIDIA's tool, which triton brings along."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    shared = max(found["SHARED"], compiled.metadata.shared)
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], shared)


def main() -> None:
    if not gateway.AVAILABLE:
        raise SystemExit(gateway.MISSING)
    if gateway.INTERPRETED:
        raise SystemExit("kernels are being interpreted: unset TRITON_INTERPRET to compile them")
    sys.stdout.write(_HEADER)
    for name, launch in launches().items():
        for capability in CAPABILITIES:
            usage = usage_of(launch.compile(capability))
            line = f"{launch.warps:5}  {usage.registers:9}  {usage.spilled:13}  {usage.shared:12}"
            sys.stdout.write(f"{name:17} {capability}  {line}\n")


if __name__ == "__main__":
    main()
