"""Settings of what is asked: policy, task, sampling, supervised data."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from tlt_pipeline.config.base import Beta, Positive, Seconds, Section, Share


class PolicyConfig(Section):
    model: str
    """A local Hugging Face folder, the name of a fetched model (`tlt models fetch`), or a hub id."""


class ReasoningGymSource(Section):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """Data set of reasoning-gym; `label` tells apart two sources of the same one."""
    label: str | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    params: dict[str, Any] = {}  # noqa: RUF012 pydantic copies it
    question_pattern: str | None = None
    """Regular expression whose first group is what the policy sees of reasoning-gym's question; None: all of it."""


class FileSource(Section):
    type: Literal["file"] = "file"
    path: str
    """JSONL or Parquet, each row a prompt (text) or messages (chat), and an answer."""
    label: str | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    verifier: str = "exact"
    """math_verify, exact, regex, or the user's `module:function` (answer: str, entry: dict) -> float."""


def _source_type(value: Any) -> str:
    """`type` may be left out: what has a path is a file."""
    if not isinstance(value, dict):
        return getattr(value, "type", "")
    keys = cast(dict[str, Any], value)
    return str(keys.get("type", "file" if "path" in keys else "reasoning_gym"))


Source = Annotated[
    Annotated[ReasoningGymSource, Tag("reasoning_gym")] | Annotated[FileSource, Tag("file")],
    Discriminator(
        _source_type,
        custom_error_type="source_type",
        custom_error_message="a task source is of type reasoning_gym or file",
    ),
]


class TaskConfig(Section):
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    prompt_template: str = "{question}"
    """Text around the question; chat models get it as the user's message through their chat template."""
    system_prompt: str | None = None
    chat: Literal["auto", "on", "off"] = "auto"
    answer_pattern: str = r"(?s)<answer>(.*?)</answer>"
    """Regular expression whose first group, at its last match, is the answer; no match scores 0."""
    verify_timeout_s: Seconds = 5.0
    verify_workers: Positive = 1
    held_out: Annotated[int, Field(ge=0)] = 64
    """Prompts kept apart for evaluation, never trained on."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Evaluate (greedy, held-out prompts) every so many steps, and at the end; 0: never."""


class RolloutConfig(Section):
    prompts_per_step: Positive = 16
    group_size: Positive = 8
    max_new_tokens: Positive = 256
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class SFTSource(Section):
    path: str | None = None
    """JSONL of {prompt, response}; None: traces of `task.sources`, written by tlt_pipeline.tasks.traces."""
    examples: Positive = 10_000
    slips: Share = 0.0
    """Share of a trace's steps that get a wrong digit, so that the model is right but unsure."""


class SFTConfig(Section):
    """Supervised training (cold start, or pretraining from nothing)."""

    out: str
    data: SFTSource = SFTSource()
    steps: Positive = 200
    tokens_per_batch: Positive = 8192
    lr: Annotated[float, Field(gt=0)] = 1e-3
    min_lr_share: Share = 0.1
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    threads: Annotated[int, Field(ge=0)] = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    log_every: Positive = 20
    new_model: dict[str, Any] | None = None
    """Hugging Face config of a model to start from random weights with a character-level tokenizer; None: start
    from `policy.model`."""
