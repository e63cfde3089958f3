"""Hidden-state shards: what the rollout streams out and the drafter trainer reads.

A shard is one safetensors blob of several documents laid end to end (T = its tokens, C = hidden size):

- `token_ids` int32 [T]
- `hidden` [T, C], bfloat16: the policy's feature *after reading* token t, before the final norm, and before it in the
  row what the drafter taps (EAGLE-3: [T, 4C]); [T, 0] where the trainer is to compute it
  (`hidden_states.source: recompute`)
- `loss_mask` uint8 [T]: 1 where token t belongs to the answer
- `starts` int32 [documents]: offset in T of each document
- `positions` int32 [documents]: absolute position, in its answer's sequence, of each document's first token
- `groups` int64 [documents]: a number that the answers to one prompt share

A document is a contiguous piece of one sequence (the prompt is in the first piece).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tlt_pipeline.blobs import BlobStore
from tlt_pipeline.messages import BlobRef

HIDDEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VECTORS = {
    "token_ids": torch.int32,
    "loss_mask": torch.uint8,
    "starts": torch.int32,
    "positions": torch.int32,
    "groups": torch.int64,
}


class ShardInvalid(ValueError):
    """A blob that is no shard of ours, or documents that can't be one; the text says why, in one line."""


@dataclass(frozen=True)
class Document:
    """A contiguous piece of one prompt-and-answer sequence, on the CPU."""

    token_ids: Tensor
    """int32 [T]"""
    hidden: Tensor
    """[T, C]: the policy's feature after reading token t, before the final norm. [T, 0]: to be recomputed."""
    loss_mask: Tensor
    """uint8 [T]: 1 where token t belongs to the answer."""
    position: int
    """Absolute position of the first token."""
    group: int = 0
    """A number that the answers to one prompt share: they are much alike."""

    def __len__(self) -> int:
        return self.token_ids.shape[0]


def write_shard(store: BlobStore, documents: Sequence[Document], name: str) -> BlobRef:
    """Writes the documents as blob `name` and returns its claim check.

    Raises ShardInvalid for no documents, or ones whose lengths, sizes or dtypes don't fit together;
    the store's errors."""
    if not documents:
        raise ShardInvalid("a shard needs at least one document")
    sizes = [len(document) for document in documents]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    hidden = [document.hidden.detach() for document in documents]
    if len({(piece.dtype, piece.shape[1:]) for piece in hidden}) != 1:
        raise ShardInvalid("the documents of a shard differ in hidden size or dtype")
    tensors = {
        "token_ids": torch.cat([document.token_ids for document in documents]).to(torch.int32),
        "hidden": torch.cat(hidden).cpu().contiguous(),
        "loss_mask": torch.cat([document.loss_mask for document in documents]).to(torch.uint8),
        "starts": torch.tensor(starts, dtype=torch.int32),
        "positions": torch.tensor([document.position for document in documents], dtype=torch.int32),
        "groups": torch.tensor([document.group for document in documents], dtype=torch.int64),
    }
    _split(tensors)  # what can't be read back is not written
    return store.write(name, save(tensors))


def read_shard(store: BlobStore, ref: BlobRef) -> list[Document]:
    """The documents of a shard, in the order they were written; tensors are views of one buffer.

    Raises BlobMissing, BlobCorrupt or BusError (from the store), ShardInvalid for content that is no shard."""
    try:
        tensors = load(store.read(ref))
    except SafetensorError as error:
        raise ShardInvalid(f"{ref.name} is not safetensors: {error}") from error
    return _split(tensors)


def _split(tensors: dict[str, Tensor]) -> list[Document]:
    for name, dtype in VECTORS.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].ndim != 1:
            raise ShardInvalid(f"shard tensor {name!r} is missing or no one-dimensional {dtype}")
    hidden = tensors.get("hidden")
    if hidden is None or hidden.ndim != 2 or hidden.dtype not in HIDDEN_DTYPES:
        raise ShardInvalid("shard tensor 'hidden' is missing or no two-dimensional floating-point tensor")
    tokens, mask = tensors["token_ids"], tensors["loss_mask"]
    starts, positions, groups = (tensors[name].tolist() for name in ("starts", "positions", "groups"))
    if not tokens.shape[0] == mask.shape[0] == hidden.shape[0] or not len(starts) == len(positions) == len(groups):
        raise ShardInvalid("the lengths of the shard's tensors differ")
    bounds = [*starts, tokens.shape[0]]
    if bounds[0] != 0 or any(high <= low for low, high in pairwise(bounds)):
        raise ShardInvalid("the shard's document offsets don't rise from 0 to its length")
    if min(positions) < 0 or tokens.min() < 0:
        raise ShardInvalid("the shard has negative positions or token ids")
    if not torch.isfinite(hidden).all():
        raise ShardInvalid("the shard's hidden states are not all finite")
    return [
        Document(tokens[low:high], hidden[low:high], mask[low:high], position, group)
        for low, high, position, group in zip(starts, bounds[1:], positions, groups, strict=True)
    ]
