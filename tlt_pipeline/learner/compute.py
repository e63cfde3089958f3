"""Which device, how many threads, which precision."""

from __future__ import annotations

import os
from typing import Literal

import torch

from tlt_pipeline.learner.scoring import Scoring
from tlt_pipeline.models.dtypes import choose_device
from tlt_pipeline.processes import usable_cores


def choose_scoring(
    device: str, dtype: str, temperature: float = 1.0, entropy: Literal["off", "value", "gradient"] = "off"
) -> Scoring:
    """`device`: auto, or torch's name; `dtype`: float32, or bfloat16 for autocast. A temperature of 0 (greedy
    answers) has no distribution to learn from; 1 is taken. Raises ConfigError for a device that isn't
    here."""
    return Scoring(choose_device(device), dtype == "bfloat16", temperature or 1.0, entropy)


def use_threads(threads: int) -> int:
    """Sets the number of CPU threads; 0: one a core that this process may use. Returns it."""
    chosen = threads or usable_cores()
    torch.set_num_threads(chosen)
    return chosen


def compute_reproducibly(device: torch.device) -> None:
    """The same input gives the same bits. On a CPU that holds anyway, with the same number of threads; on a
    GPU some operations have a faster version that sums in any order, which is switched off for this
    process."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
