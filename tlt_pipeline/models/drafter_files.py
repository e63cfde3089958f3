"""Drafters from folders: ours, and those of public formats. What config.json says and what the headers of the weights
say is held against each other before a tensor is read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tlt_pipeline.models.decoder import DecoderConfig, Rope
from tlt_pipeline.models.drafter import Drafter, EagleDrafter
from tlt_pipeline.models.drafter_config import DrafterShape, Style, read_shape
from tlt_pipeline.models.eagle3 import Eagle3Drafter
from tlt_pipeline.models.export_layout import (
    D2T,
    DRAFT_IDS,
    EMBEDDING,
    NORM,
    T2D,
    check_tensors,
    explain_embedding,
    layout_of,
)
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tensor_files import TensorFiles


def shape_of(drafter: Drafter) -> DrafterShape:
    if isinstance(drafter, Eagle3Drafter):
        rows, first = drafter.own_head.out_features, drafter.layer.norm_before_residual
        return DrafterShape("eagle3", drafter.config, drafter.taps, rows, first)
    return DrafterShape("eagle", drafter.config)


def read_drafter(
    folder: Path,
    policy: DecoderConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    embedding_VC: Tensor | None = None,
) -> Drafter:
    """`embedding_VC`: the policy's, against which a drafter's own copy is held. Raises ModelError: no drafter, another
    policy's, damaged, or one that the engine doesn't compute."""
    style, shape = read_shape(folder, policy)
    with TensorFiles(folder) as stored:
        check_tensors(stored.headers, shape, style, str(folder))
        if EMBEDDING in stored.headers:
            _check_embedding(stored.take(EMBEDDING), embedding_VC, folder)
        drafter = _empty(shape, policy)
        state: dict[str, Tensor] = {}
        for entry in layout_of(shape, style):
            parts = [stored.take(name) for name in entry.names]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            # a copy even where nothing changes: the file's mapping is not aligned, and alignment can change bits
            state[entry.own] = whole.to(device=device, dtype=dtype, copy=True)
        drafter.draft_ids = _take_ids(stored, style, shape, folder, device)
        if NORM in stored.headers and style == "plugin":
            stored.take(NORM)
        stored.refuse_left_over(tied=False)
    drafter.load_state_dict(state, strict=False, assign=True)
    drafter.rope = Rope(drafter.config).to(device)
    return drafter


def checked_ids(ids: Tensor, vocab: int, origin: str) -> Tensor:
    """Tokens that may be proposed, int64 [v]. Raises ModelError unless they are whole numbers below `vocab`,
    ascending."""
    whole = ids.ndim == 1 and len(ids) > 0 and not (ids.is_floating_point() or ids.is_complex())
    if whole and ids.dtype != torch.bool:
        ids_v = ids.to(torch.int64)
        if bool((ids_v[1:] > ids_v[:-1]).all()) and int(ids_v[0]) >= 0 and int(ids_v[-1]) < vocab:
            return ids_v
    raise ModelError(
        f"{origin}: draft_ids must be ascending token ids below {vocab}, whole numbers: train it again, or take "
        f"another drafter"
    )


def _empty(shape: DrafterShape, policy: DecoderConfig) -> EagleDrafter | Eagle3Drafter:
    with torch.device("meta"):
        if shape.kind == "eagle":
            return EagleDrafter(policy)
        assert shape.draft_vocab is not None
        return Eagle3Drafter(policy, shape.taps, shape.draft_vocab, shape.layer, shape.norm_before_residual)


def _take_ids(
    stored: TensorFiles, style: Style, shape: DrafterShape, folder: Path, device: str | torch.device
) -> Tensor | None:
    vocab = shape.layer.vocab_size
    if style == "own":
        if DRAFT_IDS not in stored.headers:
            return None
        return checked_ids(stored.take(DRAFT_IDS), vocab, str(folder)).to(device, copy=True)
    allowed_V = stored.take(T2D) if T2D in stored.headers else None
    if D2T not in stored.headers:
        if allowed_V is not None and not bool(allowed_V.all()):
            raise ModelError(f"{folder}: {T2D} without {D2T}: export it again")
        return None
    offsets_v = stored.take(D2T)
    ids_v = checked_ids(offsets_v + torch.arange(len(offsets_v)), vocab, str(folder))
    if allowed_V is not None and not torch.equal(allowed_V.nonzero().flatten(), ids_v):
        raise ModelError(f"{folder}: {D2T} and {T2D} name different tokens: export it again")
    return None if len(ids_v) == vocab else ids_v.to(device, copy=True)


def _check_embedding(own_VC: Tensor, policy_VC: Tensor | None, folder: Path) -> None:
    if policy_VC is None:
        raise ModelError(explain_embedding(folder))
    if not torch.equal(own_VC.float(), policy_VC.float().cpu()):
        raise ModelError(
            f"{folder} has another embedding than the policy, whose embedding drafters read here: take another drafter"
        )
