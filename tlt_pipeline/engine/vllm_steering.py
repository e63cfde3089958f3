"""How deep vLLM speculates, chosen by the same policies as in the native engine, from what its steps measure.

vLLM takes the depth from a table by batch size at every step; the table can be changed while it runs. It can't change
the method, mix methods or draft trees, so the arms are `off` and chains of the one drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tlt_pipeline.config import SpeculationConfig
from tlt_pipeline.engine.accounts import Reason, StrategyAccount, hindrance
from tlt_pipeline.engine.choice import make_policy
from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, Strategy, batch_bucket, chain, strategies_of

SetDepth = Callable[[int, int, int], None]
"""(smallest batch, largest batch, depth)."""


def vllm_speculation(config: SpeculationConfig) -> SpeculationConfig:
    """The arms that vLLM can do."""
    if config.drafter == "eagle":
        return config.model_copy(update={"trees": (), "ngram_depths": ()})
    return config


def decided_at_start(config: SpeculationConfig) -> dict[str, Any]:
    """For the log: the method that can't be switched at run time, and what of the config vLLM can't do."""
    arms = strategies_of(vllm_speculation(config))
    left_out = [str(arm) for arm in strategies_of(config) if arm not in arms]
    return {"method": config.drafter, "strategies": [str(arm) for arm in arms], "left_out": left_out}


class Steering:
    def __init__(self, config: SpeculationConfig, set_depth: SetDepth, seed: int = 0) -> None:
        self.config = vllm_speculation(config)
        self.strategies = strategies_of(self.config)
        self.choice = make_policy(self.config, seed)
        self.account = StrategyAccount()
        self.tokens = 0
        self.has_drafter = config.drafter != "eagle"
        self.context = 0
        """The longest prompt of late: what answers have grown to isn't known here."""
        self.moment = 0.0
        self._set_depth = set_depth
        self._depths: dict[int, int] = {}

    def new_drafter(self) -> None:
        self.has_drafter = True
        self.choice.new_drafter()

    def idle(self) -> None:
        """Nothing runs: the time until the next step is no step's."""
        self.moment = 0.0

    def measured(self, batch: int, committed: int, drafts: int, drafted: int, accepted: tuple[int, ...]) -> None:
        """One step of vLLM. `drafts`: rows that had a proposal, `drafted`: proposed tokens of all of them."""
        now, before, self.moment = time.perf_counter(), self.moment, time.perf_counter()
        self.tokens += committed
        if not before or not batch:
            return
        depth = round(drafted / drafts) if drafts else 0
        strategy = OFF if not depth else chain("ngram" if self.config.drafter == "ngram" else "eagle", depth)
        facts = StepFacts(
            strategy,
            batch,
            self.context,
            committed,
            now - before,
            1 + depth,
            accepted[:depth],
            counts=batch <= drafts or not depth,  # not a step that read prompts beside
            drafts=drafts,
        )
        self.choice.measured(facts)
        self.account.add(facts, self._hindrance(facts))
        self.steer(batch)

    def steer(self, batch: int) -> None:
        """Chooses for batches of this size, and tells vLLM where that changes anything."""
        available: tuple[Strategy, ...] = self.strategies if self.has_drafter else (OFF,)
        state = BatchState(batch, max(self.context, 1), np.full(batch, 1 << 20), available)
        depth, bucket = self.choice.choose(state).depth, batch_bucket(batch)
        if self._depths.get(bucket) != depth:
            self._depths[bucket] = depth
            self._set_depth(bucket // 2 + 1, bucket, depth)

    def _hindrance(self, facts: StepFacts) -> Reason | None:
        if self.config.drafter == "ngram" and not facts.drafts:
            return "no_match"  # whether it looked for one isn't told
        return hindrance(self.config, facts, self.has_drafter)


def make_logger(steering: Steering) -> Any:
    """A factory of vLLM's stat loggers that tells `steering` of each step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is None or iteration_stats is None:
                return
            batch = scheduler_stats.num_running_reqs + len(iteration_stats.finished_requests)
            spec, committed = scheduler_stats.spec_decoding_stats, iteration_stats.num_generation_tokens
            if spec is None:
                steering.measured(batch, committed, 0, 0, ())
            else:
                accepted = tuple(spec.num_accepted_tokens_per_pos)
                steering.measured(batch, committed, spec.num_drafts, spec.num_draft_tokens, accepted)

        def log_engine_initialized(self) -> None:
            pass

    return StepLogger
