"""A tiny policy and completions that it could have written."""

from __future__ import annotations

import numpy as np
import torch

from tlt_pipeline.config import LearnerConfig
from tlt_pipeline.learner.trainer import Trainer
from tlt_pipeline.messages import Array, Completion, DraftStats
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, initialize

CONFIG = DecoderConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


def make_policy(seed: int = 0, std: float = 0.3) -> Decoder:
    model = Decoder(CONFIG)
    initialize(model, torch.Generator().manual_seed(seed), std)
    return model


def make_trainer(seed: int = 0, **settings) -> Trainer:
    return Trainer(LearnerConfig(device="cpu", **{"lr": 1e-3, **settings}), make_policy(seed), seed)


def make_completion(group: int, index: int, prompt: list[int], tokens: list[int], reward: float, **facts) -> Completion:
    logprobs = facts.pop("logprobs", [-1.0] * len(tokens))
    policy_logprobs = facts.pop("policy_logprobs", logprobs)
    defaults = {
        "request_id": f"s00000-p{group:03d}-{index:02d}",
        "group_id": f"s00000-p{group:03d}",
        "step": 0,
        "index": index,
        "purpose": "train",
        "policy_version": 0,
        "seed": 0,
        "finish_reason": "stop",
        "draft": DraftStats(),
        "slot": 0,
        "attempt": 1,
        "claim": "exact",
        "started_at": 0.0,
        "finished_at": 1.0,
    }
    return Completion(
        prompt=Array.of(prompt),
        tokens=Array.of(tokens),
        logprobs=Array.of(logprobs, "float32"),
        policy_logprobs=Array.of(policy_logprobs, "float32"),
        reward=reward,
        **{**defaults, **facts},
    )


def make_completions(groups: int = 3, size: int = 4, seed: int = 0, **facts) -> list[Completion]:
    """Random answers of 1 to 12 tokens; rewards 0 and 1, both in every group."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        prompt = rng.integers(2, CONFIG.vocab_size, rng.integers(2, 6)).tolist()
        for index in range(size):
            tokens = rng.integers(1, CONFIG.vocab_size, rng.integers(1, 13)).tolist()
            reward = float(index == 0 or (index > 1 and rng.random() < 0.5))
            found.append(make_completion(group, index, prompt, tokens, reward, **facts))
    return found


def first_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gradients of the first update (where no clipping took place), from Adam's first moment."""
    share = 1 - trainer.config.betas[0]
    state = trainer.optimizer.state
    return {name: state[value]["exp_avg"] / share for name, value in trainer.policy.named_parameters()}


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.policy.named_parameters()}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different
