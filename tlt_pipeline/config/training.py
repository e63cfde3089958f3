"""Settings of what is trained: the policy, and the drafter with its data."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tlt_pipeline.config.base import Beta, Positive, Seconds, Section, Share


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
    """Of the prompts, that drafters are judged by; where this makes fewer than 6 in the steps kept, up to a quarter."""
    store: Literal["files", "redis"] = "files"
    """files: shards in a folder that all processes of the run see. redis: for machines that share none; shards of some
    MB at most, so small policies."""
    root: str | None = None
    """Folder of the shards; None: memory-backed (/dev/shm) where there is room, else the run directory."""
    ttl_s: Annotated[float, Field(ge=1)] = 3600.0
    """A shard in Redis is gone after so long: longer than drafter.train.keep_steps steps take."""

    @property
    def bytes_limit(self) -> int:
        """Of all shards at any moment: old ones stay until the scheduler has heard of the new ones."""
        return self.bytes_quota + self.bytes_quota // 4

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if self.store == "redis" and self.root is not None:
            raise ValueError(
                f"root ({self.root}) is a folder, and store: redis needs none: set root to null, or store to files"
            )
        return self

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
    """Of the feature loss (in units of the features' size) against the cross-entropy: what keeps deep drafts good.
    eagle alone has it."""
    unroll_steps: Annotated[int, Field(ge=0, le=8)] = 0
    """Steps of a draft that training runs on the drafter's own outputs, the first included; 0: 1 for eagle, 3 for
    eagle3."""
    publish_every_s: Seconds = 0.5
    """How often held-out data is looked at, at the soonest, to decide about a new version."""
    min_gain: Annotated[float, Field(ge=0)] = 0.002
    """Published only when held-out loss (verify passes a token) falls by at least this share, and clearly so."""
    keep_steps: Positive = 2
    """Shards of so many RL steps stay in the buffer."""
    budget: BudgetConfig = BudgetConfig()


class DrafterConfig(Section):
    kind: Literal["eagle", "eagle3"] = "eagle"
    """What is trained. eagle: reads the policy's last hidden state, scores with the policy's head. eagle3: three hidden
    states, and a head of its own over the tokens chosen at its start."""
    init: str = "from_policy_layer"
    """from_policy_layer, or the folder of a drafter (of this kind)."""
    context_window: Positive = 1024
    """Tokens that the drafter looks back at, and has to read at most when it is turned on in mid-answer."""
    vocabulary: Positive = 32768
    """The drafter proposes at most so many different tokens, the most frequent of the policy's answers."""
    train: DrafterTrainConfig = DrafterTrainConfig()
