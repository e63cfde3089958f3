"""Every setting of a run, typed. No torch here: the CLI answers before torch is imported.

`load_config(path, overrides)` reads YAML, applies `key.sub=value` overrides and returns a frozen `RunConfig`. An
unknown key is an error that names the nearest valid one.
"""

from tlt_pipeline.config.base import ConfigError
from tlt_pipeline.config.data import (
    FileSource,
    PolicyConfig,
    ReasoningGymSource,
    RolloutConfig,
    SFTConfig,
    SFTSource,
    Source,
    TaskConfig,
)
from tlt_pipeline.config.engine import EngineConfig, SpeculationConfig, VllmConfig
from tlt_pipeline.config.reading import dump_config, load_config, validate_config
from tlt_pipeline.config.run import (
    CheckpointConfig,
    LimitsConfig,
    RedisConfig,
    RunConfig,
    SlotsConfig,
    TelemetryConfig,
    WeightsConfig,
)
from tlt_pipeline.config.training import (
    BudgetConfig,
    DrafterConfig,
    DrafterTrainConfig,
    HiddenStatesConfig,
    LearnerConfig,
)

__all__ = [
    "BudgetConfig",
    "CheckpointConfig",
    "ConfigError",
    "DrafterConfig",
    "DrafterTrainConfig",
    "EngineConfig",
    "FileSource",
    "HiddenStatesConfig",
    "LearnerConfig",
    "LimitsConfig",
    "PolicyConfig",
    "ReasoningGymSource",
    "RedisConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SFTSource",
    "SlotsConfig",
    "Source",
    "SpeculationConfig",
    "TaskConfig",
    "TelemetryConfig",
    "VllmConfig",
    "WeightsConfig",
    "dump_config",
    "load_config",
    "validate_config",
]
