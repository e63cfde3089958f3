"""Advantages and the objective, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tlt_pipeline.learner.advantages import assign_advantages, group_advantages
from tlt_pipeline.learner.losses import Objective, TokenData, answer_weights, k3, policy_loss, truncated_importance
from tlt_pipeline.learner.metrics import percentile


def objective(**changes) -> Objective:
    return Objective(
        **{"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "entropy_coef": 0.0, "tis_cap": 0.0, **changes}
    )


def data(old, advantages, sampled=None, own=False, reference=None) -> TokenData:
    count = len(old)
    return TokenData(
        old_A=torch.tensor(old),
        own_A=torch.full((count,), own),
        sampled_A=torch.tensor(old if sampled is None else sampled),
        advantages_A=torch.tensor(advantages),
        weights_A=torch.full((count,), 1 / count),
        reference_A=None if reference is None else torch.tensor(reference),
    )


def test_advantages_have_mean_zero_and_unit_deviation() -> None:
    found = group_advantages([1.0, 0.0, 0.0, 0.0], True)
    assert found == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], abs=1e-5)
    assert group_advantages([1.0, 0.0, 0.0, 0.0], False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0], [0.1 + 0.2, 0.3]])
def test_group_of_equal_rewards_is_left_out(rewards) -> None:
    assert group_advantages(rewards, True) is None


def test_left_out_groups_are_counted() -> None:
    rewards = {"a0": 1.0, "a1": 0.0, "b0": 1.0, "b1": 1.0}
    groups = {request: request[0] for request in rewards}
    advantages, left_out = assign_advantages(rewards, groups, False)
    assert (advantages, left_out) == ({"a0": 0.5, "a1": -0.5}, 1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.0, 2.0, -2.0, True),
        (1.2, 1.0, -1.2, True),
        (1.5, 1.0, -1.28, False),  # good enough already
        (0.5, 1.0, -0.5, True),
        (0.5, -1.0, 0.8, False),  # bad, and avoided enough
        (1.5, -1.0, 1.5, True),
    ],
)
def test_clip(ratio, advantage, loss, moves) -> None:
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    found = policy_loss(logprobs, torch.zeros(1), data([-1.0], [advantage]), objective())
    found.loss_A.sum().backward()
    assert found.loss_A.item() == pytest.approx(loss, abs=1e-6)
    assert bool(logprobs.grad != 0) is moves
    assert bool(found.clipped_A) is not moves


def test_own_logprobs_give_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-3.0, -0.5], requires_grad=True)
    found = policy_loss(logprobs, torch.zeros(2), data([9.0, 9.0], [2.0, -1.0], own=True), objective())
    found.loss_A.sum().backward()
    assert found.ratio_A.tolist() == [1.0, 1.0]
    assert logprobs.grad.tolist() == [-2.0, 1.0]


def test_k3_is_the_divergence_on_average_and_never_negative() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    estimates = k3(policy.log(), reference.log())
    assert (estimates >= 0).all()
    exact = (policy * (policy / reference).log()).sum()
    assert (policy * estimates).sum().item() == pytest.approx(exact.item(), abs=1e-6)


def test_kl_and_entropy_enter_the_loss_with_their_coefficients() -> None:
    logprobs, entropy = torch.tensor([math.log(0.5)]), torch.tensor([1.5])
    given = data([math.log(0.5)], [0.0], reference=[math.log(0.25)])
    found = policy_loss(logprobs, entropy, given, objective(kl_coef=0.1, entropy_coef=0.01))
    kl = 0.5 - math.log(0.5) - 1
    assert found.kl_A.item() == pytest.approx(kl, abs=1e-6)
    assert found.loss_A.item() == pytest.approx(0.1 * kl - 0.01 * 1.5, abs=1e-6)


def test_importance_is_truncated_and_weighs_the_policy_term() -> None:
    weights = truncated_importance(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -5.0]), 2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0])
    assert truncated_importance(torch.tensor([-1.0]), torch.tensor([-5.0]), 0.0).tolist() == [1.0]
    found = policy_loss(
        torch.tensor([-1.0]), torch.zeros(1), data([-1.0], [1.0], sampled=[-5.0]), objective(tis_cap=2.0)
    )
    assert found.loss_A.item() == pytest.approx(-2.0)


def test_extreme_ratio_stays_finite() -> None:
    logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)
    given = data([0.0, -500.0], [-1.0, -1.0], reference=[0.0, -500.0])
    policy_loss(logprobs, torch.zeros(2), given, objective(kl_coef=0.1)).loss_A.sum().backward()
    assert logprobs.grad.isfinite().all()


def test_weights_of_token_and_sequence_level() -> None:
    assert answer_weights([1, 3], "token") == [0.25, 0.25]
    assert answer_weights([1, 3], "sequence") == [0.5, pytest.approx(1 / 6)]


def test_percentile() -> None:
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99
    assert percentile([5.0], 0.99) == 5
    assert percentile([], 0.5) == 0
