"""Which device and number format a part of the run computes on."""

from __future__ import annotations

import torch

from tlt_pipeline.config import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def choose_device(name: str) -> torch.device:
    """`auto`: the GPU where there is one. Raises ConfigError for a device that isn't here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r} can't be used here ({str(error).splitlines()[0]}): set it to auto"
        ) from error
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on GPUs and on CPUs that multiply it in hardware, float32 elsewhere."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if fast else torch.float32
