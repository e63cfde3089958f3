"""What a drafter brings on prompts that nothing was trained on: acceptance by position, greedy, a fixed chain."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlt_pipeline.config import EngineConfig, RunConfig
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.messages import RolloutRequest
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.scheduling.events import SubmitStep
from tlt_pipeline.tasks.mix import TaskMix
from tlt_services.step_requests import RequestWriter


@dataclass(frozen=True)
class Acceptance:
    """`by_position`: the share of verify passes that accepted so many proposals or more."""

    drafts: int
    by_position: tuple[float, ...]

    @property
    def length(self) -> float:
        return 1.0 + sum(self.by_position)

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.by_position)
        return f"acceptance length {self.length:.2f}, by position {shares} ({self.drafts} passes)"


def held_out_requests(
    config: RunConfig, tokenizer: Tokenizer, version: int, prompts: int, tokens: int | None = None
) -> list[RolloutRequest]:
    """Greedy requests for the run's held-out prompts. `tokens`: of an answer at most; None: the run's."""
    tasks = TaskMix(config.task, config.seed)
    order = SubmitStep(purpose="eval", step=0, prompts=prompts, group_size=1, policy_version=version)
    requests = RequestWriter(config, tasks, tokenizer).write(order)
    if tokens is None:
        return requests
    return [
        request.model_copy(update={"sampling": request.sampling.model_copy(update={"max_new_tokens": tokens})})
        for request in requests
    ]


def chain_config(config: EngineConfig, depth: int) -> EngineConfig:
    """The engine's settings with a chain of `depth` in every step."""
    speculation = config.speculation.model_copy(
        update={
            "drafter": "eagle",
            "choice": "fixed",
            "depth": depth,
            "trees": (),
            "ngram_depths": (),
            "max_batch": 1024,
        }
    )
    return config.model_copy(update={"speculation": speculation})


def measure_acceptance(
    policy: Decoder,
    drafter: Drafter,
    tokenizer: Tokenizer,
    config: RunConfig,
    requests: list[RolloutRequest],
    depth: int,
) -> Acceptance:
    """By the native engine. The requests' policy version must be 1."""
    engine = Engine(
        policy, 1, tokenizer, chain_config(config.engine, depth), context_window=config.drafter.context_window
    )
    engine.set_drafter(drafter, 1)
    with torch.inference_mode():
        finished = decode_all(engine, requests)
    return acceptance_of(finished, depth)


def acceptance_of(finished: list[Finished], depth: int) -> Acceptance:
    drafts = sum(done.draft.drafts for done in finished)
    counts = [0] * depth
    for done in finished:
        for position, count in enumerate(done.draft.accepted_by_position[:depth]):
            counts[position] += count
    return Acceptance(drafts, tuple(count / max(drafts, 1) for count in counts))
