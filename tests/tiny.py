"""A policy of some 30,000 random parameters and a run configuration that ends in seconds, for integration tests."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"


def write_tiny_policy(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder: two layers of Llama, one token a character, random weights."""
    import torch

    from tlt_pipeline.models.checkpoint import save_decoder
    from tlt_pipeline.models.decoder import Decoder, DecoderConfig, initialize
    from tlt_pipeline.models.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(ALPHABET)
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    model = Decoder(config)
    initialize(model, torch.Generator().manual_seed(seed))
    save_decoder(model, folder, {"eos_token_id": 1, "pad_token_id": 0})
    tokenizer.save(folder)
    return folder


def tiny_settings(policy: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of two steps, four answers each, on two slots; `changes` by dotted key with `__` for the
    dots: tiny_settings(policy, steps=3, slots__count=1)."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "steps": 2,
        "policy": {"model": str(policy)},
        "task": {
            "sources": [{"type": "reasoning_gym", "name": "chain_sum", "params": {"max_terms": 2, "max_digits": 1}}],
            "held_out": 0,
        },
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 24},
        "engine": {"max_batch": 4, "max_context": 128, "threads": 1},
        "learner": {"lr": 1e-4, "threads": 1},
        "drafter": {"train": {"publish_every_s": 0.2}},
        "hidden_states": {"chunk_tokens": 8, "shard_tokens": 32},
        "limits": {"heartbeat_s": 0.3, "worker_timeout_s": 20.0},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        section = settings
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return settings


def write_tiny_config(folder: Path, **changes: Any) -> Path:
    """Policy and config in `folder`; the config's path."""
    import yaml

    policy = folder / "policy"
    if not policy.exists():
        write_tiny_policy(policy)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(policy, **changes)))
    return path
