"""Which path is taken is counted; Triton's, where it was asked for, or an error. And every kernel compiles for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.unit.kernel_cases import GPU, INTERPRETER, DrawCase
from tlt_kernels import dispatch, gateway
from tlt_kernels.dispatch import TAKEN
from tlt_pipeline.engine.proposals import chain_proposals

KERNELS = (
    "noise",
    "sampling_draw",
    "draft_topk",
    "tree_accept",
    "kv_compact",
    "matmul",
    "attention",
    "soft_cross_entropy",
)
MOST_REGISTERS, MOST_SHARED = 255, 163 * 1024
"""Of a thread, on every NVIDIA GPU; bytes of a program, on an A100."""


def call_all(device: str, **path: dispatch.Path) -> Counter[tuple[str, str]]:
    """The paths taken by one call of each kernel."""
    before = TAKEN.copy()
    case = DrawCase("", rows=2, vocab=40).inputs(device)
    ints = torch.ones(2, 1, dtype=torch.int32, device=device)
    nodes = torch.zeros_like(ints)
    dispatch.gumbel_noise(case[1], case[2], **path)
    dispatch.draw(*case, **path)
    dispatch.draft_topk(*case, 2, **path)
    proposals = chain_proposals(nodes.long())
    dispatch.tree_accept(proposals, torch.zeros(2, 2, dtype=torch.int64, device=device), **path)
    cache = torch.zeros(1, 2, 2, 1, 64, 16, device=device)
    dispatch.kv_compact(cache, ints[:, 0], ints, ints[:, 0], **path)
    dispatch.linear(case[0], case[0], **path)
    look = nodes[:, 0], ints[:, 0], nodes, nodes[:, 0]
    dispatch.attention(torch.ones(2, 2, 16, device=device), *cache[0], *look, **path)
    dispatch.soft_cross_entropy(case[0], case[0].clone(), torch.ones(2, device=device), **path)
    return TAKEN - before


@pytest.mark.parametrize("device", [INTERPRETER])
def test_triton_is_taken_where_it_is_asked_for(device: str):
    assert call_all(device, path="triton") == {(kernel, "triton"): 1 for kernel in KERNELS}


@pytest.mark.parametrize("device", [GPU])
def test_triton_is_taken_on_a_gpu(device: str):
    assert call_all(device) == {(kernel, "triton"): 1 for kernel in KERNELS}


def test_pytorch_is_taken_on_a_cpu():
    assert call_all("cpu") == {(kernel, "reference"): 1 for kernel in KERNELS}


def test_float64_is_for_the_reference():
    logits, keys, hashes, sampling = DrawCase("", vocab=40).inputs()
    with pytest.raises(ValueError, match="float64"):
        dispatch.draw(logits.double(), keys, hashes, sampling, path="triton")


@pytest.mark.parametrize("device", [INTERPRETER])
def test_triton_is_taken_within_the_tests_switch(device: str):
    with dispatch.interpreted():
        assert call_all(device) == {(kernel, "triton"): 1 for kernel in KERNELS}
    test_pytorch_is_taken_on_a_cpu()


@pytest.mark.parametrize("k", [0, 41])
def test_siblings_have_a_limit(k: int):
    with pytest.raises(ValueError, match="draft between 1 and 40 siblings"):
        dispatch.draft_topk(*DrawCase("", vocab=40).inputs(), k)


@pytest.mark.parametrize("device", [INTERPRETER])
def test_many_siblings_are_for_the_reference(device: str):
    before = TAKEN.copy()
    with dispatch.interpreted():
        tokens, _ = dispatch.draft_topk(*DrawCase("", vocab=40).inputs(), dispatch.MAX_SIBLINGS + 1)
    assert tokens.shape[1] == dispatch.MAX_SIBLINGS + 1
    assert TAKEN - before == {("draft_topk", "reference"): 1}


def test_everything_but_the_kernels_works_without_triton():
    lines = [
        "import sys",
        "sys.modules['triton'] = None",
        "from tests.unit.test_kernels_dispatch import KERNELS, call_all",
        "assert call_all('cpu') == {(kernel, 'reference'): 1 for kernel in KERNELS}",
        "call_all('cpu', path='triton')",
    ]
    ran = _python("-c", "\n".join(lines))
    assert "ValueError: the Triton kernel can't run: triton is not installed (pip install" in ran.stderr


def test_an_engine_on_a_cpu_imports_no_triton():
    lines = [
        "import sys",
        "import engine_cases as cases",
        "engine = cases.engine(cases.policy())",
        "engine.submit(cases.request(0))",
        "engine.step()",
        "assert not {'tlt_kernels.gateway', 'triton'} & set(sys.modules)",
    ]
    ran = _python("-c", "\n".join(lines), PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(not gateway.AVAILABLE, reason="triton is not installed")
def test_kernels_compile_for_two_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ran = _python("-m", "tlt_kernels.compilation", TRITON_CACHE_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    with capsys.disabled():
        sys.stdout.write(f"\n{ran.stdout}")
    header, *lines = ran.stdout.splitlines()
    assert header.split()[:2] == ["kernel", "sm"]
    usage = [re.fullmatch(r"(\w+).*?\s(80|90)\s+\d+\s+(\d+)\s+(\d+)\s+(\d+)", line) for line in lines]
    assert all(usage)
    compiled = [(match[1], match[2]) for match in usage if match]
    assert set(compiled) == {(kernel, capability) for kernel in KERNELS for capability in ("80", "90")}
    for match in usage:
        assert match
        registers, spilled, shared = (int(match[i]) for i in (3, 4, 5))
        assert registers <= MOST_REGISTERS and spilled == 0
        assert shared <= MOST_SHARED


@pytest.mark.slow
@pytest.mark.skipif(not gateway.AVAILABLE, reason="triton is not installed")
def test_noise_is_compiled_without_fused_operations(tmp_path: Path):
    lines = [
        "from tlt_kernels.compilation import CAPABILITIES, launches",
        "for capability in CAPABILITIES:",
        "    text = launches()['noise'].compile(capability).asm['ptx']",
        "    assert 'fma' not in text and 'mul.rn.f32' in text",
    ]
    ran = _python("-c", "\n".join(lines), TRITON_CACHE_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr


def _python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment | variables, capture_output=True, text=True, timeout=110
    )
