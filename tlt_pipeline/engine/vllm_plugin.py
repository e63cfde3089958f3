"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): the drafter's model, the way weights
come in, the patches. Also in a `vllm serve` of an environment where this project is installed.

May be called several times in one process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from tlt_pipeline.engine.vllm_version import VLLM_VERSION, installed_vllm

PARENT = "TLT_VLLM_PARENT"
"""Environment: the process without which vLLM's engine process has no purpose."""
_WATCH_S = 1.0


def register() -> None:
    if installed_vllm() != VLLM_VERSION:
        logging.getLogger("vllm.tlt").warning(
            "tlt-pipeline drives vLLM %s, this is %s: its drafters and patches stay out", VLLM_VERSION, installed_vllm()
        )
        return
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from tlt_pipeline.engine.vllm_patches import apply_patches
    from tlt_pipeline.models.export import VLLM_ARCHITECTURE

    apply_patches()
    if VLLM_ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(VLLM_ARCHITECTURE, "tlt_pipeline.engine.vllm_drafter:TltDrafter")
    if "tlt" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("tlt", "tlt_pipeline.engine.vllm_weights", "FolderTransfer")
    _add_steering()
    _follow_parent()


def _add_steering() -> None:
    """The engine process learns to change its table of depths by batch size while it runs."""
    from vllm.v1.engine.core import EngineCore

    def set_depth(core: Any, smallest: int, largest: int, depth: int) -> None:
        table: list[int] = core.scheduler.dynamic_sd_lookup
        for batch in range(smallest, min(largest, len(table) - 1) + 1):
            table[batch] = depth

    EngineCore.tlt_set_depth = set_depth  # type: ignore[attr-defined]


def _follow_parent() -> None:
    """An engine process whose worker was killed must not live on."""
    parent = int(os.environ.get(PARENT, "0"))
    if not parent or os.getpid() == parent or os.getppid() != parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
