"""Matrix products with weights kept in the layout of the kernels: oneDNN otherwise reorders a weight at each call.

Measured on one thread of an AMD EPYC with AVX-512, all products of SmolLM2-135M, F.linear against packed, ms: bfloat16
50 and 21 (4 rows), 58 and 37 (16), 193 and 170 (128); float32 84 and 35, 110 and 58, 543 and 370. A call costs 20 µs
however small the weight is, where MKL's float32 product takes 5: small float32 weights stay as they are (the
quickstart's policy would be 5 to 25 % slower). Packed weights are a second copy in memory (SmolLM2 in bfloat16: 270 MB,
made in 0.2 s; in float32 540 MB and 0.3 s).
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 16
"""The row count that oneDNN is told when it picks a layout; any from 4 on brings the same one here (measured)."""
SMALLEST_FLOAT32 = 1 << 17
"""Weights with fewer elements aren't packed in float32."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def worth_packing(weight: Tensor) -> bool:
    if not can_pack(weight.dtype, weight.device):
        return False
    return weight.dtype != torch.float32 or weight.numel() >= SMALLEST_FLOAT32


def gains_by_packing(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) and worth_packing(module.weight) for module in model.modules())


@dataclass
class _Packed:
    weight: ref[Tensor]
    version: int
    data: Tensor | None
    """None: this weight is better left as it is."""


class PackedLinear:
    """F.linear on a CPU, for inference. A weight is packed when it is first used, and again when it was changed in
    place (not through `.data`, which PyTorch doesn't count as a change); the copy goes when the weight goes.

    Which weights are packed depends on their shape and dtype alone, so that all engines of a machine agree."""

    def __init__(self) -> None:
        self._packed: dict[int, _Packed] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = self._packed.get(id(weight))
        if found is None or found.version != weight._version or found.weight() is not weight:
            found = self._pack(weight)
        if found.data is None:
            return F.linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, found.data, bias, "none", [], "")

    def prepare(self, model: nn.Module) -> None:
        """Packs a model's linear layers now rather than in its first pass."""
        for module in model.modules():
            if isinstance(module, nn.Linear) and worth_packing(module.weight):
                self(module.weight.new_zeros(1, module.in_features), module.weight, None)

    def _pack(self, weight: Tensor) -> _Packed:
        key = id(weight)
        self._packed.pop(key, None)  # gives the old copy's memory back before the new one takes its own
        worth = worth_packing(weight)
        data = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS) if worth else None
        entry = _Packed(ref(weight, lambda dead: self._forget(key, dead)), weight._version, data)
        self._packed[key] = entry
        return entry

    def _forget(self, key: int, dead: ref[Tensor]) -> None:
        if key in self._packed and self._packed[key].weight is dead:
            del self._packed[key]

    def packed(self, weight: Tensor) -> bool:
        """Whether there is a packed copy of it."""
        found = self._packed.get(id(weight))
        return found is not None and found.data is not None

    def __len__(self) -> int:
        return len(self._packed)


packed_linear = PackedLinear()
"""The process's own: engines on the same policy share what is packed."""
