"""Settings of the rollout engine."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tlt_pipeline.config.base import Positive, Seconds, Section


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
