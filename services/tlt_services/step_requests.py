"""Makes the requests of a step: draws prompts, renders them, gives every request its name and seed."""

from __future__ import annotations

from tlt_pipeline.config import RunConfig
from tlt_pipeline.messages import Array, RolloutRequest, Sampling
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.scheduling.events import SubmitStep
from tlt_pipeline.scheduling.ids import RequestId, seed_of
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import Prompt, render, sampling_of


class PromptUnfit(ValueError):
    """A prompt that is empty or leaves no room for its answer; one line that names it and the remedy."""


class RequestWriter:
    """Pure in what it makes: the same order gives the same requests, also after a restart."""

    def __init__(self, config: RunConfig, tasks: TaskMix, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tasks = tasks
        self._tokenizer = tokenizer

    def write(self, order: SubmitStep) -> list[RolloutRequest]:
        """In the order of prompts, a group together. Raises PromptUnfit, and what tasks and tokenizer
        refuse."""
        if order.purpose == "eval":
            prompts = self._tasks.held_out()[: order.prompts]
        else:
            prompts = self._tasks.draw(order.step, order.prompts)
        rendered = [render(prompt, self._config.task, self._tokenizer) for prompt in prompts]
        self._check_lengths(prompts, rendered)
        requests: list[RolloutRequest] = []
        for number, (prompt, tokens) in enumerate(zip(prompts, rendered, strict=True)):
            requests += self._group(order, number, prompt, Array.of(tokens))
        return requests

    def _group(self, order: SubmitStep, number: int, prompt: Prompt, tokens: Array) -> list[RolloutRequest]:
        sampling = self._sampling(order)
        requests: list[RolloutRequest] = []
        for index in range(order.group_size):
            name = RequestId(order.purpose, order.step, number, index)
            requests.append(
                RolloutRequest(
                    request_id=str(name),
                    group_id=name.group,
                    step=order.step,
                    index=index,
                    purpose=order.purpose,
                    policy_version=order.policy_version,
                    seed=seed_of(self._config.seed, str(name)),
                    prompt=tokens,
                    sampling=sampling,
                    source=prompt.source,
                    entry=prompt.entry,
                )
            )
        return requests

    def _check_lengths(self, prompts: list[Prompt], rendered: list[list[int]]) -> None:
        """Names the longest, so that one change of the config is enough."""
        answer, context = self._config.rollout.max_new_tokens, self._config.engine.max_context
        by_length = sorted(zip(prompts, map(len, rendered), strict=True), key=lambda pair: pair[1])
        (shortest, least), (longest, most) = by_length[0], by_length[-1]
        if least == 0:
            raise PromptUnfit(
                f"prompt {shortest.index} of source {shortest.source!r} is empty: see task.prompt_template"
            )
        if most + answer > context:
            raise PromptUnfit(
                f"prompt {longest.index} of source {longest.source!r} has {most} tokens; with answers of "
                f"rollout.max_new_tokens={answer} that is over engine.max_context={context}: raise "
                f"engine.max_context to {most + answer} or more, or lower rollout.max_new_tokens"
            )

    def _sampling(self, order: SubmitStep) -> Sampling:
        """Evaluation is greedy, of the whole vocabulary."""
        greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0} if order.purpose == "eval" else {}
        return sampling_of(self._config.rollout, self._tokenizer.eos_ids, **greedy)
