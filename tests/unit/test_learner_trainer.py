"""The GRPO trainer: against a naive implementation, reproducible, resumable, and does it learn."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from learner_cases import (
    assert_same_bits,
    first_gradients,
    make_completion,
    make_completions,
    make_policy,
    make_trainer,
    weights_of,
)

from tlt_pipeline.config import LearnerConfig
from tlt_pipeline.learner.answers import BadCompletion
from tlt_pipeline.learner.optimizer import NonFiniteUpdate
from tlt_pipeline.learner.state import StateError, load_state, save_state, saved_versions
from tlt_pipeline.learner.trainer import StepInterrupted, Trainer


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def naive_gradients(completions, *, level="token", normalize_std=True, kl_coef=0.0, entropy_coef=0.0, temperature=1.0):
    """One answer at a time, no padding, no clipping, ratio 1."""
    model, reference = make_policy(), make_policy(1)
    groups = {}
    for completion in completions:
        groups.setdefault(completion.group_id, []).append(completion)
    counted = [group for group in groups.values() if len({completion.reward for completion in group}) > 1]
    tokens = sum(completion.tokens.length for group in counted for completion in group)
    answers = sum(len(group) for group in counted)
    total = torch.zeros(())
    for group in counted:
        rewards = torch.tensor([completion.reward for completion in group])
        advantages = rewards - rewards.mean()
        if normalize_std:
            advantages = advantages / rewards.std(correction=0)
        for completion, advantage in zip(group, advantages, strict=True):
            prompt, answer = completion.prompt.tolist(), completion.tokens.tolist()

            def score(policy, prompt=prompt, answer=answer):
                row = torch.tensor([prompt + answer])
                all_TV = torch.log_softmax(policy(row)[0] / temperature, -1)[len(prompt) - 1 : -1]
                return all_TV, all_TV.gather(-1, row[0, len(prompt) :, None])[:, 0]

            all_TV, logprobs = score(model)
            loss = -(logprobs - logprobs.detach()).exp() * advantage
            x = score(reference)[1].detach() - logprobs
            loss = loss + kl_coef * (x.exp() - x - 1)
            loss = loss + entropy_coef * (all_TV.exp() * all_TV).sum(-1)
            total = total + (loss.sum() / tokens if level == "token" else loss.mean() / answers)
    total.backward()
    return total.item(), {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"level": "sequence"},
        {"normalize_std": False},
        {"temperature": 0.6},
        {"kl_coef": 0.5},
        {"entropy_coef": 0.2, "kl_coef": 0.1, "level": "sequence"},
    ],
)
@pytest.mark.parametrize("budget", [1, 60, 8192])
def test_gradient_equals_the_naive_one(options, budget) -> None:
    completions = [
        *make_completions(),
        make_completion(9, 0, [3, 4], [5, 6], 1.0),
        make_completion(9, 1, [3, 4], [7], 1.0),
    ]
    loss, expected = naive_gradients(completions, **options)
    settings = {"loss_level": options.get("level", "token"), **options}
    settings.pop("level", None)
    temperature = settings.pop("temperature", 1.0)
    config = LearnerConfig(device="cpu", lr=1e-3, max_grad_norm=1e9, tokens_per_microbatch=budget, **settings)
    trainer = Trainer(config, make_policy(), 0, temperature=temperature, reference=make_policy(1))
    metrics = trainer.train_step(completions)
    assert metrics.loss == pytest.approx(loss, abs=1e-5)
    assert (metrics.groups, metrics.zero_variance_groups, metrics.completions) == (4, 1, 14)
    for name, gradient in first_gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


def test_same_bits_whatever_the_order_of_arrival() -> None:
    one, other = make_trainer(minibatches=2, epochs=2), make_trainer(minibatches=2, epochs=2)
    completions = make_completions()
    metrics = [one.train_step(completions), other.train_step(completions[::-1])]
    assert_same_bits(weights_of(one), weights_of(other))
    timeless = [dataclasses.replace(each, seconds=0, tokens_per_s=0) for each in metrics]
    assert timeless[0] == timeless[1]


def test_several_updates_start_at_ratio_one_and_move_on() -> None:
    first = make_trainer(minibatches=1, epochs=2, lr=0.05)
    metrics = first.train_step(make_completions())
    assert metrics.updates == 2
    assert metrics.ratio != 1.0
    assert metrics.clip_fraction > 0
    calm = make_trainer(minibatches=1, epochs=2, lr=1e-12).train_step(make_completions())
    assert calm.ratio == pytest.approx(1.0, abs=1e-6)
    assert make_trainer().train_step(make_completions()).ratio == 1.0


def test_minibatches_hold_whole_groups() -> None:
    metrics = make_trainer(minibatches=8).train_step(make_completions(groups=3))
    assert metrics.updates == 3


def test_stale_answers_are_held_to_the_policy_that_wrote_them() -> None:
    stale = make_completions(policy_version=0)
    config = LearnerConfig(device="cpu", lr=1e-3)
    metrics = Trainer(config, make_policy(), 0, version=2).train_step(stale)
    assert metrics.ratio != 1.0  # the rollout's logprobs are all -1
    assert (metrics.staleness_mean, metrics.staleness_max) == (2.0, 2)
    corrected = Trainer(config.model_copy(update={"tis_cap": 1.5}), make_policy(), 0, version=2).train_step(stale)
    assert corrected.ratio == 1.0
    assert 0 < corrected.importance <= 1.5


def test_all_rewards_equal_moves_the_version_only() -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    metrics = trainer.train_step([completion.model_copy(update={"reward": 1.0}) for completion in make_completions()])
    assert (metrics.updates, metrics.zero_variance_groups, metrics.loss, trainer.version) == (0, 3, 0.0, 1)
    assert_same_bits(before, weights_of(trainer))


def test_resumed_training_is_bit_identical(tmp_path) -> None:
    steps = [make_completions(seed=seed) for seed in range(4)]
    through = make_trainer(minibatches=2, warmup_steps=3)
    for number, completions in enumerate(steps):
        if number == 2:
            save_state(through, tmp_path)
            saved = weights_of(through)
        through.train_step([completion.model_copy(update={"policy_version": number}) for completion in completions])
    policy = make_policy(5)
    policy.load_state_dict(saved, strict=False)
    resumed = Trainer(through.config, policy, 0, version=2)
    assert load_state(resumed, tmp_path) == 2
    for number in (2, 3):
        resumed.train_step([completion.model_copy(update={"policy_version": number}) for completion in steps[number]])
    assert_same_bits(weights_of(through), weights_of(resumed))
    assert through.updates == resumed.updates


def test_state_files_are_few_and_checked(tmp_path) -> None:
    trainer = make_trainer()
    for _ in range(4):
        trainer.train_step([each.model_copy(update={"policy_version": trainer.version}) for each in make_completions()])
        save_state(trainer, tmp_path, keep=2)
    assert saved_versions(tmp_path) == [3, 4]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["v000003.safetensors", "v000004.safetensors"]
    behind = make_trainer()
    assert load_state(behind, tmp_path) is None
    (tmp_path / "v000004.safetensors").write_bytes(b"torn")
    with pytest.raises(StateError, match="can't be read"):
        load_state(trainer, tmp_path)


@pytest.mark.parametrize(("reward", "error"), [(float("nan"), BadCompletion), (1e38, NonFiniteUpdate)])
def test_what_is_not_finite_stops_before_a_weight_moves(reward, error) -> None:
    trainer = make_trainer(normalize_std=False)
    before = weights_of(trainer)
    completions = make_completions()
    completions[0] = completions[0].model_copy(update={"reward": reward})
    with pytest.raises(error):
        trainer.train_step(completions)
    assert trainer.intact
    assert trainer.version == 0
    assert_same_bits(before, weights_of(trainer))


def test_interrupted_step_leaves_no_trace() -> None:
    trainer, calls = make_trainer(tokens_per_microbatch=20), itertools.count()
    with pytest.raises(StepInterrupted):
        trainer.train_step(make_completions(), stop=lambda: next(calls) == 2)
    assert trainer.intact
    trainer.train_step(make_completions())
    fresh = make_trainer(tokens_per_microbatch=20)
    fresh.train_step(make_completions())
    assert_same_bits(weights_of(trainer), weights_of(fresh))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": []}, "no tokens"),
        ({"logprobs": [-1.0]}, "another number of logprobs"),
    ],
)
def test_bad_completion_is_named(change, text) -> None:
    facts = {"tokens": [3, 4], "logprobs": [-1.0, -1.0], **change}
    bad = make_completion(0, 1, [5], facts["tokens"], 0.0, logprobs=facts["logprobs"])
    with pytest.raises(BadCompletion, match=f"s00000-p000-01.*{text}"):
        make_trainer().train_step([make_completion(0, 0, [5], [6], 1.0), bad])


def test_request_twice_is_refused() -> None:
    completions = make_completions()
    with pytest.raises(BadCompletion, match="there twice"):
        make_trainer().train_step([*completions, completions[0]])


def sample(policy, prompts, length, generator):
    """Answers of a fixed length with their log-probabilities."""
    rows = torch.tensor(prompts)
    logprobs = []
    for _ in range(length):
        all_BV = torch.log_softmax(policy(rows)[:, -1], -1).detach()
        drawn = torch.multinomial(all_BV.exp(), 1, generator=generator)
        logprobs.append(all_BV.gather(-1, drawn))
        rows = torch.cat([rows, drawn], 1)
    return rows[:, -length:].tolist(), torch.cat(logprobs, 1).tolist()


def test_reward_rises_on_a_bandit() -> None:
    """Paid: the share of tokens that repeat the prompt's last one."""
    trainer = make_trainer(lr=1e-2, max_grad_norm=10.0)
    generator = torch.Generator().manual_seed(0)
    curve, gaps = [], []
    for step in range(25):
        completions = []
        for group in range(8):
            prompt = [2, 3 + group % 4]
            answers, logprobs = sample(trainer.policy, [prompt] * 8, 4, generator)
            for index, (tokens, drawn) in enumerate(zip(answers, logprobs, strict=True)):
                reward = tokens.count(prompt[-1]) / 4
                completions.append(
                    make_completion(group, index, prompt, tokens, reward, logprobs=drawn, policy_version=step)
                )
        metrics = trainer.train_step(completions)
        curve.append(metrics.reward_mean)
        gaps.append(metrics.rollout_gap_max)
    assert sum(curve[:3]) / 3 < 0.15
    assert sum(curve[-3:]) / 3 > 0.6
    assert max(gaps) < 1e-4  # trainer and sampler agree about the policy
