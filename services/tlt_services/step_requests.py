"""Makes the requests of a step: draws prompts, renders them, gives every request its name and seed."""

from __future__ import annotations

from tlt_pipeline.config import RunConfig
from tlt_pipeline.messages import Array, RolloutRequest, Sampling
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.scheduling.events import SubmitStep
from tlt_pipeline.scheduling.ids import RequestId, seed_of
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import Prompt, render


class PromptTooLong(ValueError):
    """A prompt leaves no room for its answer; one line that names it and the remedy."""


class RequestWriter:
    """Pure in what it makes: the same order gives the same requests, also after a restart."""

    def __init__(self, config: RunConfig, tasks: TaskMix, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tasks = tasks
        self._tokenizer = tokenizer

    def write(self, order: SubmitStep) -> list[RolloutRequest]:
        """In the order of prompts, a group together. Raises PromptTooLong, and what tasks and tokenizer
        refuse."""
        if order.purpose == "eval":
            prompts = self._tasks.held_out()[: order.prompts]
        else:
            prompts = self._tasks.draw(order.step, order.prompts)
        return [request for number, prompt in enumerate(prompts) for request in self._group(order, number, prompt)]

    def _group(self, order: SubmitStep, number: int, prompt: Prompt) -> list[RolloutRequest]:
        tokens = Array.of(self._render(prompt))
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

    def _render(self, prompt: Prompt) -> list[int]:
        tokens = render(prompt, self._config.task, self._tokenizer)
        answer, context = self._config.rollout.max_new_tokens, self._config.engine.max_context
        if len(tokens) + answer > context:
            raise PromptTooLong(
                f"prompt {prompt.index} of source {prompt.source!r} has {len(tokens)} tokens; with answers of "
                f"rollout.max_new_tokens={answer} that is over engine.max_context={context}: raise "
                f"engine.max_context to {len(tokens) + answer} or more, or lower rollout.max_new_tokens"
            )
        if not tokens:
            raise PromptTooLong(f"prompt {prompt.index} of source {prompt.source!r} is empty: see task.prompt_template")
        return tokens

    def _sampling(self, order: SubmitStep) -> Sampling:
        """Evaluation is greedy."""
        rollout = self._config.rollout
        drawn = (
            {"temperature": 0.0}
            if order.purpose == "eval"
            else {"temperature": rollout.temperature, "top_k": rollout.top_k, "top_p": rollout.top_p}
        )
        return Sampling.model_validate(
            {
                **drawn,
                "max_new_tokens": rollout.max_new_tokens,
                "stop_token_ids": self._tokenizer.eos_ids,
                "stop": rollout.stop,
            }
        )
