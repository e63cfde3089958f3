"""From the engine's features to shards on the bus: which answers are kept, and when a shard is full.

The choice is a function of the request's id, so that a repeated answer falls on the same side (training or held out).
Nothing here blocks the rollout: what exceeds the rate is counted and dropped.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter

import torch

from tlt_pipeline.blobs import BlobStore
from tlt_pipeline.config import HiddenStatesConfig
from tlt_pipeline.drafter.shards import Document, write_shard
from tlt_pipeline.engine.results import FeaturePiece
from tlt_pipeline.messages import HiddenShard


class ShardStream:
    """Collects pieces of answers and writes them as shards of about `shard_tokens` tokens."""

    def __init__(self, store: BlobStore, config: HiddenStatesConfig, slot: int, worker: str) -> None:
        self.store, self.config, self.slot = store, config, slot
        self.worker = worker
        self.counts: Counter[str] = Counter()
        self._documents: dict[bool, list[Document]] = {False: [], True: []}
        self._step, self._version, self._written = 0, 0, 0
        # a restarted worker must not write over what its predecessor announced
        self._incarnation = uuid.uuid4().hex[:8]

    def add(self, piece: FeaturePiece) -> list[HiddenShard]:
        """-> the shards that this piece filled."""
        request = piece.request
        if request.purpose != "train":
            return []
        if _share(request.request_id, "rate") >= self.config.sample_rate:
            self.counts["not_sampled"] += 1
            return []
        full: list[HiddenShard] = []
        if request.policy_version != self._version:
            full += self.flush()
        self._step, self._version = request.step, request.policy_version
        # by prompt: its other answers would give most of a held-out one away
        held_out = _share(request.group_id, "held out") < self.config.held_out_share
        self._documents[held_out].append(document_of(piece))
        if sum(map(len, self._documents[held_out])) >= self.config.shard_tokens:
            full += self._write(held_out)
        return full

    def flush(self) -> list[HiddenShard]:
        """Writes what is there, full or not: the worker falls idle, or the policy changes."""
        return [shard for held_out in (False, True) for shard in self._write(held_out)]

    def _write(self, held_out: bool) -> list[HiddenShard]:
        documents, self._documents[held_out] = self._documents[held_out], []
        if not documents:
            return []
        self._written += 1
        shard_id = f"v{self._version:06d}-{self.worker}-{self._incarnation}-{self._written:06d}"
        blob = write_shard(self.store, documents, f"{shard_id}.safetensors")
        return [
            HiddenShard(
                shard_id=shard_id,
                blob=blob,
                slot=self.slot,
                step=self._step,
                policy_version=self._version,
                documents=len(documents),
                tokens=sum(map(len, documents)),
                held_out=held_out,
            )
        ]


def document_of(piece: FeaturePiece) -> Document:
    length = piece.tokens_T.shape[0]
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[max(piece.answer_from - piece.start, 0) :] = 1
    return Document(piece.tokens_T.to(torch.int32).cpu(), piece.features_TC.cpu(), mask, piece.start)


def _share(name: str, purpose: str) -> float:
    """A number in [0, 1) that belongs to the request, or to its group."""
    digest = hashlib.sha256(f"{purpose}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64
