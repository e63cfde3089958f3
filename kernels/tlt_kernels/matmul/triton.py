"""Tiles of one size whatever the number of rows, and inputs summed in one order: a row's bits depend on that row and
the weights (He, "Defeating Nondeterminism in LLM Inference", 2025). No split of the sum, no tuning by shape, and one
compiled code whatever N is.

Shapes: N = rows, C = inputs, F = outputs.
"""

from torch import Tensor

from tlt_kernels.gateway import Launch, dot, jit_generic, tl

ROWS, OUTPUTS, INPUTS, WARPS = 16, 64, 64, 8
"""A tile. 16 rows are the least that tensor cores take, and about what decoding brings."""


@jit_generic("N")
def linear_kernel(
    x, weight, bias, out, row_stride, N, F, C,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    x_tile = x + rows[:, None].to(tl.int64) * row_stride + inputs[None, :]
    weight_tile = weight + outputs[None, :].to(tl.int64) * C + inputs[:, None]
    total = tl.full((ROWS, OUTPUTS), 0.0, tl.float32)
    for first in range(0, C, INPUTS):
        inside = first + inputs < C
        a = tl.load(x_tile + first, mask=(rows < N)[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight_tile + first, mask=(outputs < F)[None, :] & inside[:, None], other=0.0)
        total = dot(a, b, total)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=outputs < F, other=0.0).to(tl.float32)[None, :]
    places = out + rows[:, None].to(tl.int64) * F + outputs[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(rows < N)[:, None] & (outputs < F)[None, :])


def prepare(x_NC: Tensor, weight_FC: Tensor, bias_F: Tensor | None = None) -> tuple[Launch, Tensor]:
    assert x_NC.stride(-1) == 1 and weight_FC.is_contiguous()
    (N, C), F = x_NC.shape, len(weight_FC)
    out_NF = x_NC.new_empty(N, F)
    pointers = {"x": x_NC, "weight": weight_FC, "bias": out_NF if bias_F is None else bias_F, "out": out_NF}
    numbers = {"row_stride": x_NC.stride(0), "N": N, "F": F, "C": C}
    constants = {"ROWS": ROWS, "OUTPUTS": OUTPUTS, "INPUTS": INPUTS, "HAS_BIAS": bias_F is not None}
    return Launch(linear_kernel, (-(-F // OUTPUTS), -(-N // ROWS)), pointers | numbers, constants, WARPS), out_NF


def linear(x_NC: Tensor, weight_FC: Tensor, bias_F: Tensor | None = None) -> Tensor:
    launch, out_NF = prepare(x_NC, weight_FC, bias_F)
    launch.run()
    return out_NF
