"""The only module that imports triton: whether it is there, how kernels are launched, interpreted and compiled.

What kernels rely on, said here once:
- Outside `tl.dot`, products and sums are not fused: that rounds once where PyTorch rounds twice. (Triton would fuse.)
- TRITON_INTERPRET=1, set before this module is first imported, runs kernels on CPU tensors, in numpy. The interpreter
  holds bfloat16 as 16-bit integers and multiplies those in `tl.dot`; `dot` below widens them first. It takes about 1 ms
  to call any function of Triton's own library that is written in Triton (`tl.zeros`; `tl.full` is not).
- Without triton installed this module imports, AVAILABLE is False, and no kernel module can be imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None  # pyright: ignore[reportAssignmentType]

AVAILABLE = triton is not None
MISSING = "triton is not installed (pip install 'tlt-pipeline[triton]')"
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
WARP = 32


@dataclass(frozen=True)
class Launch:
    """One call of a kernel, prepared: what it is launched with is also what it is compiled for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Tensors (a pointer each) and integers."""
    constants: dict[str, Any] = field(default_factory=dict)
    warps: int = 4

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, enable_fp_fusion=False)

    def compile(self, capability: int) -> Any:
        """For a GPU of that compute capability (80: A100, 90: H100), none needed here -> triton's CompiledKernel."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature = {name: _type_name(value) for name, value in self.arguments.items()}
        signature |= dict.fromkeys(self.constants, "constexpr")
        names = self.kernel.arg_names
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind[0] == "*"}
        source = ASTSource(self.kernel, {name: signature[name] for name in names}, self.constants, aligned)
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        return triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)


def _type_name(value: Any) -> str:
    from triton.runtime.jit import mangle_type

    return mangle_type(value)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, or a function that kernels call."""
    return triton.jit(function)


def jit_generic(*integers: str) -> Callable[[Callable[..., Any]], Any]:
    """The same, and one compiled code for all values of these arguments; Triton compiles others anew for 1 and for
    multiples of 16, which might sum in another order."""
    return triton.jit(do_not_specialize=list(integers))


if AVAILABLE:
    _WIDEN = tl.constexpr(INTERPRETED)

    @jit
    def dot(a, b, total):
        """total + a @ b; products of float32 in float32, not in TF32."""
        if _WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        return tl.dot(a, b, total, input_precision="ieee")
