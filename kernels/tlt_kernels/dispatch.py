"""How the project calls the kernels: Triton for CUDA tensors, the PyTorch reference otherwise.

TAKEN counts the calls by (kernel, path), so that a path that was to be taken and wasn't is seen. Triton is imported
when it is first needed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from tlt_pipeline.engine.proposals import Accepted, Proposals
from tlt_pipeline.engine.sampling import Draw, RowSampling

Path = Literal["auto", "triton", "reference"]
TAKEN: Counter[tuple[str, str]] = Counter()
MAX_SIBLINGS = 16
"""Beyond that the reference is taken: a program keeps its candidates in registers."""
_log = logging.getLogger(__name__)


def gumbel_noise(keys_N2: Tensor, hashes_V: Tensor, path: Path = "auto") -> Tensor:
    """See `noise.reference`."""
    return _module("noise", path, keys_N2).gumbel_noise(keys_N2, hashes_V)


def draw(logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, sampling: RowSampling, path: Path = "auto") -> Draw:
    """`engine.sampling.draw` on the noise of these keys, without writing that noise. The tokens are the same on every
    path; the logprobs are equal up to rounding."""
    return _module("sampling_draw", path, logits_NV).draw(logits_NV, keys_N2, hashes_V, sampling)


def draft_topk(
    logits_NV: Tensor, keys_N2: Tensor, hashes_V: Tensor, sampling: RowSampling, k: int, path: Path = "auto"
) -> tuple[Tensor, Tensor]:
    """See `draft_topk.reference`. ValueError for a k that the vocabulary doesn't have."""
    if not 1 <= k <= logits_NV.shape[-1]:
        raise ValueError(f"k is {k}: draft between 1 and {logits_NV.shape[-1]} siblings")
    if path == "auto" and k > MAX_SIBLINGS:
        path = "reference"
    return _module("draft_topk", path, logits_NV).draft_topk(logits_NV, keys_N2, hashes_V, sampling, k)


def tree_accept(proposals: Proposals, draws_BW: Tensor, path: Path = "auto") -> Accepted:
    """See `tree_accept.reference`."""
    return _module("tree_accept", path, draws_BW).tree_accept(proposals, draws_BW)


def kv_compact(data_A2RHLD: Tensor, lengths_B: Tensor, nodes_BP: Tensor, counts_B: Tensor, path: Path = "auto") -> None:
    """See `kv_compact.reference`. Changes `data`."""
    _module("kv_compact", path, data_A2RHLD).kv_compact(data_A2RHLD, lengths_B, nodes_BP, counts_B)


def linear(x_NC: Tensor, weight_FC: Tensor, bias_F: Tensor | None = None, path: Path = "auto") -> Tensor:
    """See `matmul.reference`; batch-invariant on the Triton path."""
    return _module("matmul", path, x_NC).linear(x_NC, weight_FC, bias_F)


def attention(
    q_NHD: Tensor,
    keys_RKLD: Tensor,
    values_RKLD: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    paths_NP: Tensor,
    since_N: Tensor,
    path: Path = "auto",
) -> Tensor:
    """See `attention.reference`; batch-invariant on the Triton path."""
    module = _module("attention", path, q_NHD)
    return module.attention(q_NHD, keys_RKLD, values_RKLD, rows_N, lengths_N, paths_NP, since_N)


_on_cpu = False


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within, `auto` takes Triton for CPU tensors too, as if a GPU had them: a test's way to run an engine on kernels
    without one. TRITON_INTERPRET=1 must have been set."""
    global _on_cpu
    before, _on_cpu = _on_cpu, True
    try:
        yield
    finally:
        _on_cpu = before


def takes_triton(tensor: Tensor) -> bool:
    """What `auto` means for tensors like this one."""
    return path_for(tensor, "auto") == "triton"


def soft_cross_entropy(scores_NV: Tensor, policy_NV: Tensor, weight_N: Tensor, path: Path = "auto") -> Tensor:
    """See `soft_cross_entropy.reference`. Changes `scores`."""
    return _module("soft_cross_entropy", path, scores_NV).soft_cross_entropy(scores_NV, policy_NV, weight_N)


def path_for(tensor: Tensor, path: Path) -> Literal["triton", "reference"]:
    """ValueError where Triton is asked for and can't run."""
    if path == "reference" or (path == "auto" and not (tensor.is_cuda or _on_cpu)):
        return "reference"
    hindrance = _hindrance(tensor)
    if hindrance is None:
        return "triton"
    if path == "triton":
        raise ValueError(f"the Triton kernel can't run: {hindrance}")
    _warn_once(hindrance)
    return "reference"


def _hindrance(tensor: Tensor) -> str | None:
    if tensor.dtype == torch.float64:
        return "kernels compute in float32, and this is float64"
    from tlt_kernels import gateway

    if not gateway.AVAILABLE:
        return gateway.MISSING
    if not tensor.is_cuda and not gateway.INTERPRETED:
        return f"the tensors are on {tensor.device.type}; set TRITON_INTERPRET=1 before the start to interpret it there"
    return None


_warned: set[str] = set()


def _warn_once(hindrance: str) -> None:
    if hindrance not in _warned:
        _warned.add(hindrance)
        _log.warning("PyTorch instead of Triton kernels: %s", hindrance)


def _module(kernel: str, path: Path, tensor: Tensor) -> Any:
    taken = path_for(tensor, path)
    TAKEN[kernel, taken] += 1
    return importlib.import_module(f"tlt_kernels.{kernel}.{taken}")
