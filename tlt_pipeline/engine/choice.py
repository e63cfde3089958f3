"""The strategy policy that the config asks for."""

from __future__ import annotations

from tlt_pipeline.config import SpeculationConfig
from tlt_pipeline.engine.bandit import Bandit
from tlt_pipeline.engine.goodput import Goodput
from tlt_pipeline.engine.strategies import Fixed, StrategyPolicy, strategies_of


def make_policy(config: SpeculationConfig, seed: int = 0) -> StrategyPolicy:
    strategies = strategies_of(config)
    match config.choice:
        case "goodput":
            return Goodput(strategies, config.max_batch, seed)
        case "beg_mab":
            return Bandit(strategies, config.max_batch, config.epsilon, seed)
        case "fixed":
            return Fixed(strategies, config.max_batch)
