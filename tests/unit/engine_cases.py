"""Tiny policies, drafters and requests for the engine's tests."""

from __future__ import annotations

from random import Random

import torch

from tlt_pipeline.config import EngineConfig, SpeculationConfig
from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.strategies import BatchState, StepFacts, Strategy
from tlt_pipeline.messages import Array, RolloutRequest, Sampling
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, initialize
from tlt_pipeline.models.drafter import Drafter, DrafterKind, drafter_from_policy
from tlt_pipeline.models.eagle3_start import eagle3_from_policy
from tlt_pipeline.models.tokenizer import Tokenizer, character_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +-=.?\n"
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8},
    "qwen3": {"qk_norm": True, "num_heads": 4, "num_kv_heads": 1, "head_dim": 32},
}


def tokenizer() -> Tokenizer:
    return character_tokenizer(ALPHABET)


def policy(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16} | FAMILIES[family]
    config = DecoderConfig(
        vocab_size=tokenizer().vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        max_position_embeddings=256,
        **shape,
    )
    model = Decoder(config)
    initialize(model, torch.Generator().manual_seed(seed), std=0.15)
    return model.to(dtype)


def drafter(model: Decoder, seed: int | None = None, kind: DrafterKind = "eagle") -> Drafter:
    """From the policy's last layer, or with `seed` a random one (which is nearly always wrong)."""
    made = drafter_from_policy(model) if kind == "eagle" else eagle3_from_policy(model)
    if seed is not None:
        initialize(made, torch.Generator().manual_seed(seed), std=0.1)
    return made


def engine(
    model: Decoder,
    *,
    batch: int = 8,
    depth: int = 4,
    speculate_up_to: int = 8,
    choice: str = "fixed",
    exact: str = "on",
    context_window: int = 1024,
    trees: tuple[str, ...] = ("3x3x8", "5x4x16"),
) -> Engine:
    speculation = SpeculationConfig(depth=depth, max_batch=speculate_up_to, choice=choice, trees=trees)  # type: ignore[arg-type]
    config = EngineConfig(max_batch=batch, max_context=200, exact=exact, speculation=speculation)  # type: ignore[arg-type]
    return Engine(model, 0, tokenizer(), config, feature_chunk=16, context_window=context_window)


class Shuffled:
    """Any strategy at any step."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, state: BatchState) -> Strategy:
        return self._random.choice(state.available)

    def measured(self, facts: StepFacts) -> None:
        pass

    def new_drafter(self) -> None:
        pass


def request(number: int, **sampling: object) -> RolloutRequest:
    """Groups of three share a prompt; lengths differ."""
    group = number // 3
    generator = torch.Generator().manual_seed(group)
    prompt = torch.randint(2, tokenizer().vocab_size, (5 + group * 3,), generator=generator).tolist()
    settings = {"max_new_tokens": 6 + 11 * (number % 4), **sampling}
    return RolloutRequest(
        request_id=f"r{number}",
        group_id=f"g{group}",
        step=0,
        index=number % 3,
        policy_version=0,
        seed=10_000 + number,
        prompt=Array.of(prompt),
        sampling=Sampling.model_validate(settings),
        source="none",
        entry="{}",
    )
