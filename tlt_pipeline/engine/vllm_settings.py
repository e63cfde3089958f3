"""From our settings to vLLM's: engine arguments, environment, sampling parameters. One place that knows their names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tlt_pipeline.config import EngineConfig
from tlt_pipeline.engine.vllm_plugin import PARENT
from tlt_pipeline.messages import Sampling
from tlt_pipeline.models.decoder import DecoderConfig
from tlt_pipeline.models.drafter import EagleDrafter
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.export import vllm_config

EXTENSION = "tlt_pipeline.engine.vllm_weights.WorkerExtension"
TEMPERATURES = (0.01, 2.0)
"""vLLM's limits, beside 0."""


def write_drafter_config(policy: DecoderConfig, dtype: torch.dtype, folder: Path) -> Path:
    """A drafter's folder without weights: vLLM builds the model from it, and gets the weights when there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        drafter = EagleDrafter(policy)
    content = vllm_config(drafter.config, policy.num_layers, dtype)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    return folder


def speculative_arguments(config: EngineConfig, drafter: Path | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; the depth is the deepest that may be chosen, by a schedule that can be changed
    while it runs. The method can't."""
    speculation = config.speculation
    if speculation.drafter == "off":
        return None
    if speculation.drafter == "ngram":
        depth = speculation.depth if speculation.choice == "fixed" else max(speculation.ngram_depths)
        method: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    else:
        depth = speculation.depth
        method = {"method": "eagle3", "model": str(drafter)}
    return {
        **method,
        "num_speculative_tokens": depth,
        "num_speculative_tokens_per_batch_size": [(1, config.max_batch, depth)],
    }


def engine_arguments(config: EngineConfig, policy: Path, drafter: Path | None, *, stop_strings: bool) -> dict[str, Any]:
    """For AsyncEngineArgs. `policy`: a folder of the policy's architecture; weights come later, also the first ones."""
    device = choose_device(config.device)
    dtype = str(choose_dtype(config.dtype, device)).removeprefix("torch.")
    own = config.vllm
    memory: dict[str, Any] = {"gpu_memory_utilization": own.gpu_memory_utilization}
    if device.type == "cpu" or own.kv_cache_gb is not None:
        memory["kv_cache_memory_bytes"] = int((own.kv_cache_gb or 1.0) * (1 << 30))
    speculation: dict[str, Any] = {"speculative_config": speculative_arguments(config, drafter)}
    if speculation["speculative_config"] is not None:  # vLLM refuses to count what it doesn't do
        speculation["per_request_spec_decode_metrics"] = "summary"
    return {
        "model": str(policy),
        "dtype": dtype,
        "load_format": "dummy",
        "hf_overrides": {"tie_word_embeddings": False},  # a tied LM head would keep its old weight (vllm_weights.py)
        "weight_transfer_config": {"backend": "tlt"},
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": not stop_strings,
        "max_model_len": config.max_context,
        "max_num_seqs": config.max_batch,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": own.enforce_eager,
        "enable_sleep_mode": device.type == "cuda" and own.sleep_level > 0,
        "seed": 0,
        **memory,
        **speculation,
    }


@contextmanager
def engine_environment(threads: int) -> Generator[None]:
    """The environment that the engine process is started in."""
    wanted = {
        PARENT: str(os.getpid()),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():  # measured: several times faster than the OpenMP that torch brings
        wanted["LD_PRELOAD"] = str(openmp)
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def sampling_arguments(sampling: Sampling, seed: int) -> dict[str, Any]:
    """For SamplingParams: where an answer ends is decided as in the native engine, so vLLM's own rules stay out."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "seed": seed,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
        "logprobs": 0,
    }


def temperature_objection(temperature: float) -> str | None:
    """Why vLLM can't draw at this temperature (a low one it would raise to its limit, with a warning)."""
    low, high = TEMPERATURES
    if temperature == 0 or low <= temperature <= high:
        return None
    return (
        f"vLLM draws at temperatures of 0 and from {low:g} to {high:g}, not at {temperature:g}: engine.type: native can"
    )
