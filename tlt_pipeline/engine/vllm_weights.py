"""Weights into a running vLLM: one transfer engine for policy and drafter, from the files of our weight sets.

Every update ends with a check that the modules compute with the new weights: on a CPU a weight is packed when it is
loaded, and the LM head of a model with tied embeddings keeps its old packing where only the embedding is given, with
a warning as the only sign. So vLLM is told that nothing is tied, and the head is given by its own name.
Shapes: C = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_PROBED = 4
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass
class FolderInit(WeightTransferInitInfo):
    pass


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """`folder`: of safetensors files; `tied`: the LM head has the embedding's weight."""

    folder: str
    tied: bool = False


class FolderTransfer(WeightTransferEngine[FolderInit, FolderUpdate]):
    init_info_cls = FolderInit
    update_info_cls = FolderUpdate

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FolderUpdate) -> None:
        self.model.load_weights(read_tensors(Path(update_info.folder), tied=update_info.tied))

    def shutdown(self) -> None:
        pass


def read_tensors(folder: Path, *, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 not a mapping
                tensor = opened.get_tensor(name)
                yield name, tensor
                if tied and name == _EMBEDDING:
                    yield _HEAD, tensor


class WorkerExtension:
    """What our rollout worker asks of vLLM's worker (`collective_rpc`). Each call is whole: no step runs in it."""

    def tlt_load_policy(self, folder: str, tied: bool) -> None:
        """Raises RuntimeError where a module computes with other weights than the folder's."""
        self.start_weight_update()  # type: ignore[attr-defined] of vLLM's worker
        self.update_weights({"folder": folder, "tied": tied})  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]
        policy: Any = self.get_model()  # type: ignore[attr-defined]
        drafter: Any = self.get_draft_model()  # type: ignore[attr-defined]
        if drafter is not None and hasattr(drafter, "follow_policy"):
            drafter.follow_policy(policy)
        check_policy(policy, Path(folder), tied)

    def tlt_check_policy(self, folder: str, tied: bool) -> None:
        check_policy(self.get_model(), Path(folder), tied)  # type: ignore[attr-defined]

    def tlt_load_drafter(self, folder: str) -> None:
        """`folder`: an exported drafter."""
        drafter: Any = self.get_draft_model()  # type: ignore[attr-defined]
        with drafter.alone():
            self.start_draft_weight_update()  # type: ignore[attr-defined]
            self.update_weights({"folder": folder})  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
        policy: Any = self.get_model()  # type: ignore[attr-defined]
        drafter.follow_policy(policy)
        check_drafter(drafter, Path(folder))

    def tlt_release_cache(self) -> int:
        """Gives the pages of the KV cache back (CPU, where vLLM has no sleep) -> their bytes. They read as zero."""
        from tlt_pipeline.engine.vllm_memory import release_pages

        caches = self.model_runner.kv_caches  # type: ignore[attr-defined]
        return sum(release_pages(cache) for cache in _distinct(caches))


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


def check_policy(policy: Any, folder: Path, tied: bool) -> None:
    """The embedding, first and last layer and the LM head, each by what it computes."""
    last = policy.config.num_hidden_layers - 1
    queries = "model.layers.0.self_attn.q_proj.weight"
    down, head = f"model.layers.{last}.mlp.down_proj.weight", _EMBEDDING if tied else _HEAD
    found = _read(folder, {_EMBEDDING, _NORM, queries, down, head})
    embedding_VC = policy.model.embed_tokens.weight[: len(found[_EMBEDDING])]  # vLLM's is padded
    _compare("the embedding", _rows(embedding_VC), _rows(found[_EMBEDDING]))
    _compare("the final norm", policy.model.norm.weight, found[_NORM])
    _compare_linear("layer 0's queries", policy.model.layers[0].self_attn.qkv_proj, found[queries])
    _compare_linear("the last layer's down projection", policy.model.layers[last].mlp.down_proj, found[down])
    _compare_linear("the LM head", policy.lm_head, found[head])


def check_drafter(drafter: Any, folder: Path) -> None:
    names = {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"}
    found, layer = _read(folder, names), drafter.model.layers[0]
    _compare_linear("the drafter's fc", drafter.model.fc, found["fc.weight"])
    _compare_linear("the drafter's queries", layer.self_attn.qkv_proj, found["layers.0.self_attn.q_proj.weight"])
    _compare_linear("the drafter's down projection", layer.mlp.down_proj, found["layers.0.mlp.down_proj.weight"])


def _read(folder: Path, names: set[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in names & set(opened.keys())})
    return found


def _rows(tensor: Tensor) -> Tensor:
    return tensor[:: max(len(tensor) // 64, 1)]


def _compare_linear(what: str, module: nn.Module, weight: Tensor) -> None:
    """By a product with random inputs: packed weights can't be read back. Fused modules: the first rows."""
    some = next((p for p in module.parameters() if p.numel()), None)
    device = weight.device if some is None else some.device
    dtype = getattr(module, "params_dtype", torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBED, weight.shape[1], generator=generator).to(device=device, dtype=dtype)
    out = module.quant_method.apply(module, x, bias=None)  # type: ignore[operator,union-attr]
    expected = x.float() @ weight.to(device=device, dtype=dtype).float().T
    _compare(what, out[:, : len(weight)], expected)


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    expected = expected.to(found.device, torch.float32)
    error = (found.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-9)
    if not error <= _TOLERANCE.get(found.dtype, 5e-2):  # NaN counts as wrong
        raise RuntimeError(f"vLLM goes on computing with other weights after an update: {what} is off by {error:.2g}")
