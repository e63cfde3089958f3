"""Noise and draws: a pure function of seed, position and token, with the right distribution."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from tests.unit.kernel_cases import EDGES, hashes_for
from tlt_pipeline.engine.gumbel_table import gumbel_table
from tlt_pipeline.engine.noise import gumbel_noise, noise_keys, token_hashes
from tlt_pipeline.engine.sampling import RowSampling, draw, filter_logits, first_argmax


def noise(seeds, positions, vocab):
    keys = noise_keys(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))
    return gumbel_noise(keys, token_hashes(vocab))


def plain(rows: int, temperature: float = 1.0) -> RowSampling:
    return RowSampling(torch.full((rows, 1), 1 / temperature), torch.ones(rows, 1))


def test_noise_does_not_depend_on_its_neighbours():
    whole = noise([1, 2, 2**62], [5, 5, 70_000], 1000)
    assert torch.equal(whole[1:2], noise([2], [5], 1000))
    assert torch.equal(whole[:, :10], noise([1, 2, 2**62], [5, 5, 70_000], 10))


def test_noise_computed_in_parts_is_the_same():
    seeds, vocab = np.arange(5), 50_000
    assert torch.equal(noise(seeds, seeds, vocab), torch.cat([noise([seed], [seed], vocab) for seed in seeds]))


def test_noise_is_standard_gumbel_and_finite():
    values = noise(np.arange(8000), np.arange(8000) % 7, 500).double()
    assert torch.isfinite(values).all()
    assert abs(values.mean() - 0.57722) < 0.01
    assert abs(values.var() - np.pi**2 / 6) < 0.02
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        expected = -np.log(-np.log(quantile))
        assert abs(np.quantile(values.numpy(), quantile) - expected) < 0.05


def test_noise_is_the_gumbel_quantile_in_both_tails():
    values = gumbel_noise(torch.zeros(1, 2, dtype=torch.int32), hashes_for(EDGES))[0].double().numpy()
    u = (np.abs(EDGES.astype(np.float64)) + np.where(EDGES < 0, -0.5, 0.5)) * 2.0**-32
    expected = -np.log(np.where(EDGES < 0, -np.log(u), -np.log1p(-u)))
    assert np.abs(values - expected).max() < 3e-6


def test_the_noise_of_all_machines_is_one():
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in gumbel_table(torch.device("cpu"))))
    assert digest.hexdigest() == "e0e09d315428d7dbec2de39b3eb2d069f8fc32b40be7abca0cfa05170970950a"
    assert noise([7], [3], 2)[0].tolist() == [-0.3765203356742859, 0.1983720064163208]


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated():
    def correlation(a, b):
        return abs(np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1])

    base = noise(np.arange(400), np.full(400, 9), 300)
    assert correlation(base, noise(np.arange(400) + 1, np.full(400, 9), 300)) < 0.01
    assert correlation(base, noise(np.arange(400), np.full(400, 10), 300)) < 0.01
    assert correlation(base[:, 1:], base[:, :-1]) < 0.01


def test_draws_follow_the_distribution():
    rows = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    drawn = draw(logits.expand(rows, -1), noise(np.arange(rows), np.full(rows, 3), 6), plain(rows, 0.8))
    expected = torch.softmax(logits / 0.8, -1).double() * rows
    observed = torch.bincount(drawn.tokens_N, minlength=6).double()
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_filters_keep_the_top_and_break_ties_by_token_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 5.0, 0.0, 4.0, 0.0]])
    kept = filter_logits(logits, torch.tensor([2, 0]), torch.tensor([1.0, 0.9]))
    assert torch.isfinite(kept).tolist() == [
        [False, True, True, False, False],
        [False, True, False, True, False],
    ]


def test_logprobs_belong_to_the_filtered_and_the_unfiltered_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    sampling = RowSampling(torch.ones(1, 1), torch.ones(1, 1), torch.tensor([2]), torch.tensor([1.0]))
    drawn = draw(logits, noise([4], [4], 3), sampling)
    token = int(drawn.tokens_N)
    assert token in (1, 2)
    assert torch.allclose(drawn.policy_logprobs_N, torch.log_softmax(logits, -1)[0, token])
    assert torch.allclose(drawn.logprobs_N, torch.log_softmax(logits[0, 1:], -1)[token - 1])


def test_rows_of_a_large_vocabulary_are_drawn_as_if_alone():
    rows, vocab = 23, 256 * 80
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator).mul_(3).to(torch.bfloat16)
    values = noise(np.arange(rows), np.arange(rows), vocab)
    temperatures = torch.linspace(0.5, 1.5, rows).unsqueeze(1)
    filters = torch.arange(rows) % 3 * 7, torch.linspace(0.6, 1.0, rows)
    for sampling in (
        RowSampling(1 / temperatures, torch.ones(rows, 1)),
        RowSampling(1 / temperatures, torch.ones(rows, 1), *filters),
    ):
        together = draw(logits, values, sampling)
        for row in range(rows):
            part = slice(row, row + 1)
            alone = draw(logits[part], values[part], sampling.rows(part))
            assert torch.equal(alone.tokens_N, together.tokens_N[part])
            assert torch.equal(alone.logprobs_N, together.logprobs_N[part])
            assert torch.equal(alone.policy_logprobs_N, together.policy_logprobs_N[part])


def test_argmax_in_two_steps_is_the_first_of_the_greatest():
    x = torch.randint(0, 40, (200, 256 * 20), generator=torch.Generator().manual_seed(0)).float()
    expected = [row.index(max(row)) for row in x.tolist()]
    assert first_argmax(x).tolist() == expected
    assert first_argmax(x[:, :1000]).tolist() == x[:, :1000].argmax(-1).tolist()
    x[:] = float("-inf")
    assert first_argmax(x).tolist() == [0] * 200
