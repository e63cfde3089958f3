"""Each patch is needed by the installed vLLM, and does what it says. Fails when a patch has become superfluous."""

import pytest
import torch

pytestmark = pytest.mark.vllm


def test_installed_version_is_the_one_that_was_tried():
    from tlt_pipeline.engine.vllm_version import VLLM_VERSION, installed_vllm, require_vllm

    assert installed_vllm() == VLLM_VERSION
    require_vllm()


def test_every_patch_is_still_needed():
    from tlt_pipeline.engine.vllm_patches import PATCHES
    from tlt_pipeline.engine.vllm_version import VLLM_VERSION

    for patch in PATCHES:
        assert patch.fits(VLLM_VERSION), f"{patch.name}: the installed version is past {patch.last}: remove the patch"
        assert patch.needed(), f"{patch.name}: the fault is mended: end its range before this version"


def test_expanding_repeats_each_requests_value():
    from tlt_pipeline.engine.vllm_patches import expand_to_tokens

    expanded = expand_to_tokens(torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5]), 5, 0, 1)
    assert expanded.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    greedy = expand_to_tokens(torch.tensor([0.0, 0.7]), torch.tensor([1, 2]), 2, 0, 1)
    assert greedy.tolist() == pytest.approx([1.0, 0.7])
