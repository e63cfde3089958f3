"""Linear layers and attention on fixed tiles: near the reference, and a row's bits depend on nothing but that row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import on_every_device
from tlt_kernels import dispatch

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 1.6e-2}}


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return dispatch.linear(x, weight, bias, path="triton")


@on_every_device
@both_dtypes
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "biased"), [(1, 64, 64, False), (3, 100, 70, True), (17, 192, 130, False)]
)
def test_linear(device: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool):
    x, weight = normal(rows, inputs, dtype=dtype, device=device), normal(outputs, inputs, dtype=dtype, device=device)
    bias = normal(outputs, dtype=dtype, device=device) if biased else None
    expected = dispatch.linear(x, weight, bias, path="reference")
    torch.testing.assert_close(linear(x, weight, bias), expected, **TOLERANCE[dtype])


@on_every_device
@both_dtypes
def test_rows_of_a_linear_layer_are_independent(device: str, dtype: torch.dtype):
    x, weight = normal(40, 200, dtype=dtype, device=device), normal(96, 200, dtype=dtype, device=device)
    whole = linear(x, weight)
    for rows in (1, 2, 15, 16, 17, 33):
        assert torch.equal(linear(x[:rows], weight), whole[:rows])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(linear(x[order], weight), whole[order])
    spoiled = x.clone()
    spoiled[1:] = float("nan")
    assert torch.equal(linear(spoiled, weight)[:1], whole[:1])


def own_slots(lengths: Tensor, places: int = 1) -> Tensor:
    """The last tokens, each at its own position."""
    return (lengths.unsqueeze(1) - torch.arange(places, 0, -1, dtype=torch.int32, device=lengths.device)).clamp_min(0)


class Answers:
    """Keys and values of three answers of different lengths, and a query at the end of each."""

    def __init__(self, dtype: torch.dtype, device: str, heads: int = 6, kv_heads: int = 2, head_size: int = 20) -> None:
        shape = (3, kv_heads, 200, head_size)
        self.keys = normal(*shape, dtype=dtype, device=device, seed=1)
        self.values = normal(*shape, dtype=dtype, device=device, seed=2)
        self.queries = normal(3, heads, head_size, dtype=dtype, device=device, seed=3)
        self.rows = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
        self.lengths = torch.tensor([1, 64, 150], dtype=torch.int32, device=device)
        self.since = torch.zeros_like(self.lengths)

    def attend(self, pick: Tensor | slice = slice(None), cache: slice = slice(None), path: str = "triton") -> Tensor:
        keys, values, lengths = self.keys[:, :, cache], self.values[:, :, cache], self.lengths[pick]
        return dispatch.attention(
            self.queries[pick], keys, values, self.rows[pick], lengths, own_slots(lengths), self.since[pick], path=path
        )


@on_every_device
@both_dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(6, 2, 20), (4, 4, 64), (20, 1, 16)])
def test_attention(device: str, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int):
    answers = Answers(dtype, device, heads, kv_heads, head_size)
    torch.testing.assert_close(answers.attend(), answers.attend(path="reference"), **TOLERANCE[dtype])


@on_every_device
@both_dtypes
def test_queries_are_independent(device: str, dtype: torch.dtype):
    answers = Answers(dtype, device)
    whole = answers.attend()
    for pick in (
        slice(0, 1),
        slice(1, 3),
        torch.tensor([2, 0, 1], device=device),
        torch.tensor([2] * 7, device=device),
    ):
        assert torch.equal(answers.attend(pick), whole[pick])
    assert torch.equal(answers.attend(cache=slice(0, 150)), whole)
    for row, length in enumerate(answers.lengths.tolist()):
        answers.keys[row, :, length:] = answers.values[row, :, length:] = float("nan")
    assert torch.equal(answers.attend(), whole)


@on_every_device
@both_dtypes
@pytest.mark.parametrize("since", [1, 63, 64, 100, 149])
def test_a_query_may_look_back_a_part_of_the_way(device: str, dtype: torch.dtype, since: int):
    answers = Answers(dtype, device)
    answers.since[2] = since
    seen = answers.attend(slice(2, 3))
    torch.testing.assert_close(seen, answers.attend(slice(2, 3), path="reference"), **TOLERANCE[dtype])
    answers.keys[2, :, :since] = answers.values[2, :, :since] = float("nan")
    assert torch.equal(answers.attend(slice(2, 3)), seen)


@on_every_device
@both_dtypes
@pytest.mark.parametrize("length", [2, 62, 64, 66, 128, 150])
def test_a_tree_node_sees_what_decoding_would_show_it(device: str, dtype: torch.dtype, length: int):
    """The last tokens of its path, scattered among other nodes, give the bits that they give side by side."""
    answers = Answers(dtype, device)
    lengths = torch.full((1,), length, dtype=torch.int32, device=device)
    common = (answers.queries[:1], answers.keys, answers.values, answers.rows[:1], lengths)
    since = answers.since[:1]
    decoded = dispatch.attention(*common, own_slots(lengths), since, path="triton")
    assert torch.equal(dispatch.attention(*common, own_slots(lengths, 7), since, path="triton"), decoded)
    named = min(length, 4)
    slots = torch.tensor([171, 173, 180, 199][-named:], device=device)
    for cached in (answers.keys, answers.values):
        cached[0, :, slots] = cached[0, :, length - named : length].clone()
        cached[0, :, length - named : length] = 7.0
    paths = torch.tensor([[171, 173, 180, 199]], dtype=torch.int32, device=device)
    expected = dispatch.attention(*common, paths, since, path="reference")
    in_tree = dispatch.attention(*common, paths, since, path="triton")
    assert torch.equal(in_tree, decoded)
    torch.testing.assert_close(in_tree, expected, **TOLERANCE[dtype])
