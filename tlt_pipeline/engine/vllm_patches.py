"""Faults of vLLM that this project works around, in one place: each with the versions that have it.

`tests/vllm/test_patches.py` fails for each patch that the installed version no longer needs. What the first one is
for, by a failing test:
`TLT_VLLM_UNPATCHED=expand_batch_to_tokens .venv-vllm/bin/python -m pytest -m vllm tests/vllm -k distribution`
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from packaging.version import Version
from torch import Tensor

from tlt_pipeline.engine.vllm_version import installed_vllm

UNPATCHED = "TLT_VLLM_UNPATCHED"
"""Environment: names of patches to leave out, by commas, to see what they are for."""


@dataclass(frozen=True)
class Patch:
    """`first`, `last`: the versions known to have the fault. `needed`: tries it out, unpatched."""

    name: str
    about: str
    first: str
    last: str
    needed: Callable[[], bool]
    apply: Callable[[], None]

    def fits(self, version: str) -> bool:
        return Version(self.first) <= Version(version) <= Version(self.last)


def apply_patches() -> list[str]:
    """Applies what the installed version needs -> the names. A patch whose fault isn't there stays out."""
    version, unwanted = installed_vllm(), os.environ.get(UNPATCHED, "").split(",")
    assert version is not None
    applied = [patch for patch in PATCHES if patch.fits(version) and patch.name not in unwanted and patch.needed()]
    for patch in applied:
        patch.apply()
    return [patch.name for patch in applied]


def expand_to_tokens(
    x_B: Tensor, cumulated_B: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Each request's value once for each of its draft tokens [tokens]; `replace_from` becomes `replace_to`."""
    counts_B = torch.diff(cumulated_B, prepend=cumulated_B.new_zeros(1))
    x_B = torch.where(x_B == replace_from, torch.full_like(x_B, replace_to), x_B)
    return x_B.repeat_interleave(counts_B.long(), output_size=tokens)


def _expands_wrongly() -> bool:
    """The CPU stand-in for the Triton kernel that `expand_batch_to_tokens` calls."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    temperatures_B, counts_B = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 4], dtype=torch.int32)
    found = torch.full((4,), 7.0)
    cpu_triton_utils._expand_kernel_impl(found, temperatures_B, counts_B, 0, 1)
    return not torch.equal(found, torch.tensor([0.5, 0.5, 1.0, 2.0]))


def _expand_right() -> None:
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_to_tokens


PATCHES = (
    Patch(
        name="expand_batch_to_tokens",
        about="on CPUs a request's temperature is written into a discarded copy, and the policy's logits are divided "
        "by what was in memory: wrong samples at T > 0 with speculation, silently",
        first="0.20.0",
        last="0.32.0",
        needed=_expands_wrongly,
        apply=_expand_right,
    ),
)
