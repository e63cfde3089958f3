"""Noise, draw and draft top-k: the same tokens, and the same bits of noise, as the PyTorch reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernel_cases import DRAWS, EDGES, DrawCase, drawn_by_name, hashes_for, on_every_device
from tlt_kernels import dispatch
from tlt_kernels.sampling_draw.reference import filter_border
from tlt_pipeline.engine.noise import gumbel_noise, noise_keys, token_hashes
from tlt_pipeline.engine.sampling import filter_logits

UNFILTERED = [case for case in DRAWS if case.top_k is None]


@on_every_device
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 64), (5, 3001), (1, 151_936)])
def test_noise_has_the_same_bits(device: str, rows: int, vocab: int):
    keys = noise_keys(np.arange(rows, dtype=np.uint64), np.arange(rows) + 5)
    noise = dispatch.gumbel_noise(keys.to(device), token_hashes(vocab, device), path="triton")
    assert torch.equal(noise.cpu().view(torch.int32), gumbel_noise(keys, token_hashes(vocab)).view(torch.int32))


@on_every_device
def test_noise_has_the_same_bits_at_its_edges(device: str):
    keys, hashes = torch.zeros(1, 2, dtype=torch.int32), hashes_for(EDGES)
    noise = dispatch.gumbel_noise(keys.to(device), hashes.to(device), path="triton")
    assert torch.equal(noise.cpu().view(torch.int32), gumbel_noise(keys, hashes).view(torch.int32))


@on_every_device
@drawn_by_name(DRAWS)
def test_draw(device: str, case: DrawCase):
    expected = dispatch.draw(*case.inputs(), path="reference")
    drawn = dispatch.draw(*case.inputs(device), path="triton")
    assert torch.equal(drawn.tokens_N.cpu(), expected.tokens_N)
    _assert_close(drawn.logprobs_N, expected.logprobs_N, case)
    _assert_close(drawn.policy_logprobs_N, expected.policy_logprobs_N, case)


@on_every_device
@pytest.mark.parametrize("k", [3, 8])
@drawn_by_name([case for case in UNFILTERED if case.vocab >= 8])
def test_draft_topk(device: str, case: DrawCase, k: int):
    expected_tokens, expected_scores = dispatch.draft_topk(*case.inputs(), k, path="reference")
    tokens, scores = dispatch.draft_topk(*case.inputs(device), k, path="triton")
    assert torch.equal(tokens.cpu(), expected_tokens)
    _assert_close(scores, expected_scores, case)
    assert all(len(set(row)) == k for row in tokens.tolist())


@on_every_device
@drawn_by_name(UNFILTERED[:5])
def test_the_best_sibling_is_the_draw(device: str, case: DrawCase):
    drawn = dispatch.draw(*case.inputs(device), path="triton")
    tokens, _ = dispatch.draft_topk(*case.inputs(device), 1, path="triton")
    assert torch.equal(tokens[:, 0], drawn.tokens_N)


@on_every_device
def test_a_row_does_not_depend_on_its_neighbours(device: str):
    logits, keys, hashes, sampling = DrawCase("", rows=3).inputs(device)
    whole = dispatch.draw(logits, keys, hashes, sampling, path="triton")
    _, _, _, one_row = DrawCase("", rows=1).inputs(device)
    alone = dispatch.draw(logits[1:2], keys[1:2], hashes, one_row, path="triton")
    assert torch.equal(alone.tokens_N, whole.tokens_N[1:2])
    assert torch.equal(alone.logprobs_N, whole.logprobs_N[1:2])


@drawn_by_name([case for case in DRAWS if case.top_k is not None])
def test_the_border_keeps_what_the_filters_keep(case: DrawCase):
    logits, _, _, sampling = case.inputs()
    scaled = logits.float() * sampling.inverse_temperature_N1
    kept = filter_logits(scaled, sampling.top_k_N, sampling.top_p_N).isfinite()
    border = filter_border(scaled, sampling.top_k_N, sampling.top_p_N)
    values, last_ids = border.values_N[:, None], border.last_ids_N[:, None]
    within = (scaled > values) | ((scaled == values) & (torch.arange(case.vocab) <= last_ids))
    assert torch.equal(within, kept)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, case: DrawCase) -> None:
    # the reference subtracts a normalizer as large as the logits, and rounds there
    rounding = 4 * torch.finfo(torch.float32).eps * 5 * case.scale / min(t for t in (*case.temperatures, 1.0) if t > 0)
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-5 + rounding, rtol=1e-5)
