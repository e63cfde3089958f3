"""Which device, how many threads, which precision."""

from __future__ import annotations

import torch

from tlt_pipeline.config import ConfigError
from tlt_pipeline.learner.scoring import Precision
from tlt_pipeline.processes import usable_cores


def choose_precision(device: str, dtype: str) -> Precision:
    """`device`: auto, or torch's name. Raises ConfigError if it isn't there."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"learner.device {device!r} is no device of PyTorch: use auto, cpu or cuda"
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"learner.device is {device!r}, but PyTorch sees no GPU here: set it to auto or cpu"
        )
    return Precision(chosen, autocast=dtype == "bfloat16")


def use_threads(threads: int) -> int:
    """Sets the number of CPU threads; 0: one a core that this process may use. Returns it."""
    chosen = threads or usable_cores()
    torch.set_num_threads(chosen)
    return chosen
