"""Answers that the policy writes to the task's prompts: what a drafter learns from before any rollout is done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_pipeline.config import EngineConfig, RunConfig, SpeculationConfig
from tlt_pipeline.drafter.initial import feature_taps
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.results import FeaturePiece
from tlt_pipeline.messages import Array, RolloutRequest
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import render, sampling_of

AT_ONCE = 32
"""Answers written side by side."""


class TextWriter:
    """Writes answers of at most `answer_tokens` tokens, sampled as in the rollout."""

    def __init__(self, config: RunConfig, policy: Decoder, tokenizer: Tokenizer, answer_tokens: int) -> None:
        """Raises what tasks refuse."""
        self._config, self._tokenizer = config, tokenizer
        self._tasks = TaskMix(config.task, config.seed)
        self._context = min(config.engine.max_context, policy.config.max_position_embeddings)
        most = min(answer_tokens, config.rollout.max_new_tokens)
        self._sampling = sampling_of(config.rollout, tokenizer.eos_ids, max_new_tokens=most)
        off = SpeculationConfig(drafter="off")
        settings = EngineConfig(max_batch=AT_ONCE, max_context=self._context, exact="off", speculation=off)
        chunk, taps = config.hidden_states.chunk_tokens, feature_taps(config, policy.config)
        self._engine = Engine(policy, 0, tokenizer, settings, feature_chunk=chunk, taps=taps)

    def write(self, number: int, count: int) -> tuple[list[Tensor], list[FeaturePiece]]:
        """Answers to the prompts that step `number` would have -> whole texts, int64 [T] each, and the policy's
        features with them. Prompts that leave no room for an answer are left out."""
        prompts = self._tasks.draw(number, count)
        rendered = [render(prompt, self._config.task, self._tokenizer) for prompt in prompts]
        done = decode_all(self._engine, self._requests(number, rendered))
        texts = [torch.tensor(each.request.prompt.tolist() + each.tokens) for each in done]
        return texts, self._engine.take_pieces()

    def _requests(self, number: int, prompts: Sequence[list[int]]) -> list[RolloutRequest]:
        room = self._context - self._sampling.max_new_tokens
        return [
            RolloutRequest(
                request_id=f"text-{number}-{index}",
                group_id=f"text-{number}-{index}",
                step=number,
                index=0,
                policy_version=0,
                seed=(self._config.seed + number) * len(prompts) + index,
                prompt=Array.of(prompt),
                sampling=self._sampling,
                source="",
                entry="",
            )
            for index, prompt in enumerate(prompts)
            if 2 <= len(prompt) < room
        ]
