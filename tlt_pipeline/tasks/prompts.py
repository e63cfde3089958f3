"""What a task hands out: a prompt, its text for the model, and the answer found in what the model wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tlt_pipeline.config import RolloutConfig, TaskConfig
from tlt_pipeline.messages import Sampling

Message = Mapping[str, Any]


class TaskError(ValueError):
    """A task that can't be used as configured; the text is one line with the remedy."""


class ChatTokenizer(Protocol):
    """What `render` needs of a tokenizer (tlt_pipeline.models.tokenizer.Tokenizer has it)."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode_prompt(self, text: str) -> list[int]: ...

    def apply_chat(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    source: str
    """Label of the task source."""
    index: int
    """Position in the source: which example it is."""
    question: str
    """Text of the question; empty where `messages` is given."""
    messages: tuple[Message, ...] | None
    answer: str
    entry: str
    """JSON of what the source's verifier needs."""


def sampling_of(rollout: RolloutConfig, stop_token_ids: Sequence[int], **changes: Any) -> Sampling:
    """How a rollout samples its answers. `changes`: fields that are to be others."""
    fields = rollout.model_dump(include={"temperature", "top_k", "top_p", "max_new_tokens", "stop"})
    return Sampling.model_validate({**fields, "stop_token_ids": stop_token_ids, **changes})


def render(prompt: Prompt, config: TaskConfig, tokenizer: ChatTokenizer) -> list[int]:
    """Token ids of the prompt: through the chat template where there is one (`task.chat`), else as plain text.

    Raises TaskError where a chat is asked for and the tokenizer has no template."""
    chat = tokenizer.has_chat_template if config.chat == "auto" else config.chat == "on"
    if chat and not tokenizer.has_chat_template:
        raise TaskError("task.chat is on but the policy's tokenizer has no chat template: set task.chat to off")
    if not chat:
        if prompt.messages is not None:
            raise TaskError(
                f"source {prompt.source!r} holds messages, which need a chat template: "
                f"take a policy whose tokenizer has one, or rows with a text prompt"
            )
        return tokenizer.encode_prompt(prompt_text(prompt, config))
    return tokenizer.apply_chat(_chat_messages(prompt, config))


def prompt_text(prompt: Prompt, config: TaskConfig) -> str:
    """The question inside `task.prompt_template`. Only the literal `{question}` is replaced, so that a
    template may hold other braces (`\\boxed{}`)."""
    text = config.prompt_template.replace("{question}", prompt.question)
    return text if config.system_prompt is None else f"{config.system_prompt}\n{text}"


def _chat_messages(prompt: Prompt, config: TaskConfig) -> list[Message]:
    if prompt.messages is not None:
        messages: list[Message] = list(prompt.messages)
    else:
        messages = [{"role": "user", "content": config.prompt_template.replace("{question}", prompt.question)}]
    if config.system_prompt is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def extract_answer(text: str, pattern: str) -> str | None:
    """First group of the pattern's last match in the text, stripped; None without a match.

    Raises TaskError if the pattern is no regular expression or has no group."""
    found: str | None = None
    for match in compile_pattern(pattern, "task.answer_pattern").finditer(text):
        found = match.group(1) or ""
    return None if found is None else found.strip()


@lru_cache(maxsize=64)
def compile_pattern(pattern: str, setting: str) -> re.Pattern[str]:
    """Compiles a pattern that has a group. Raises TaskError naming the setting."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise TaskError(f"{setting} {pattern!r} is no regular expression: {error}") from error
    if compiled.groups < 1:
        raise TaskError(f"{setting} {pattern!r} has no group: put the wanted part in parentheses")
    return compiled
