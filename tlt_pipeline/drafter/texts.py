"""Text that the policy writes to the task's prompts: what a drafter starts from before any rollout is done."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_pipeline.config import EngineConfig, RunConfig, SpeculationConfig
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.messages import Array, RolloutRequest, Sampling
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import render

AT_ONCE = 32
"""Answers written side by side."""


def write_texts(
    config: RunConfig, policy: Decoder, tokenizer: Tokenizer, *, count: int, answer_tokens: int
) -> list[Tensor]:
    """Prompts of the task's first step with answers of at most `answer_tokens` tokens, each int64 [T]. Prompts that
    leave no room for an answer are left out. Raises what tasks and tokenizer refuse."""
    rollout, context = config.rollout, min(config.engine.max_context, policy.config.max_position_embeddings)
    answer_tokens = min(answer_tokens, rollout.max_new_tokens)
    sampling = Sampling(
        max_new_tokens=answer_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop_token_ids=tuple(tokenizer.eos_ids),
    )
    prompts = [render(each, config.task, tokenizer) for each in TaskMix(config.task, config.seed).draw(0, count)]
    requests = [
        RolloutRequest(
            request_id=f"text{number}",
            group_id=f"text{number}",
            step=0,
            index=0,
            policy_version=0,
            seed=config.seed + number,
            prompt=Array.of(prompt),
            sampling=sampling,
            source="",
            entry="",
        )
        for number, prompt in enumerate(prompts)
        if 2 <= len(prompt) < context - answer_tokens
    ]
    engine = Engine(
        policy,
        0,
        tokenizer,
        EngineConfig(max_batch=AT_ONCE, max_context=context, exact="off", speculation=SpeculationConfig(drafter="off")),
    )
    answers = decode_all(engine, requests)
    return [torch.tensor(done.request.prompt.tolist() + done.tokens) for done in answers]
