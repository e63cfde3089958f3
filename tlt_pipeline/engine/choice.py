"""The strategy policy that the config asks for."""

from __future__ import annotations

from tlt_pipeline.config import SpeculationConfig
from tlt_pipeline.engine.bandit import Bandit
from tlt_pipeline.engine.goodput import Goodput
from tlt_pipeline.engine.strategies import OFF, Fixed, StrategyPolicy, chain, strategies_of


def make_policy(config: SpeculationConfig, seed: int = 0) -> StrategyPolicy:
    match config.choice:
        case "goodput":
            return Goodput(strategies_of(config), config.max_batch, seed)
        case "beg_mab":
            return Bandit(strategies_of(config), config.max_batch, config.epsilon, seed)
        case "fixed":
            strategy = OFF if config.drafter == "off" else chain(config.drafter, config.depth)
            return Fixed(strategy, config.max_batch)
