"""From the engine's features to shards on the bus: which answers and which parts of them are kept, and when a shard is
full.

Whether an answer is kept, and on which side (training or held out), is a function of its request's id, so that a
repeated one falls on the same side. Where there is room for a part only (of an answer, of the quota), what is worth
most is kept: long answers, and places where proposals were rejected. Nothing here blocks the rollout or ends it: what
doesn't fit is dropped and counted.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
import torch

from tlt_pipeline.blobs import BlobStore, BlobTooLarge
from tlt_pipeline.bus import BusError
from tlt_pipeline.config import HiddenStatesConfig
from tlt_pipeline.drafter.shards import Document, write_shard
from tlt_pipeline.engine.results import FeaturePiece
from tlt_pipeline.messages import HiddenShard, RolloutRequest
from tlt_pipeline.rundir import StorageError

_log = structlog.get_logger("tlt.drafter")


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of an answer on its way, and how many proposals were rejected in it."""

    document: Document
    rejections: int = 0

    def __len__(self) -> int:
        return len(self.document)

    @property
    def worth(self) -> float:
        """Of a token: more where drafts were rejected, and where the answer has become long."""
        return (1 + self.rejections) / len(self) * (self.document.position + len(self))


@dataclass
class _Answer:
    """One that is being written: tokens that have left, and pieces of which the best will."""

    left: int = 0
    held: list[Piece] = field(default_factory=list[Piece])


class ShardStream:
    """Collects pieces of answers and writes them as shards of about `shard_tokens` tokens. `counts`: what was dropped,
    by reason (answers, or pieces of them)."""

    def __init__(self, store: BlobStore, config: HiddenStatesConfig, slot: int, worker: str) -> None:
        self.store, self.config, self.slot = store, config, slot
        self.worker = worker
        self.counts: Counter[str] = Counter()
        self._answers: dict[str, _Answer] = {}
        self._pieces: dict[bool, list[Piece]] = {False: [], True: []}
        self._step, self._version, self._written = 0, 0, 0
        # a restarted worker must not write over what its predecessor announced
        self._incarnation = uuid.uuid4().hex[:8]

    def add(self, piece: FeaturePiece) -> list[HiddenShard]:
        """-> the shards that this piece filled."""
        request, limit = piece.request, self.config.tokens_per_answer
        if request.purpose != "train" or self._is_left_out(request):
            return []
        made = Piece(document_of(piece), piece.rejections)
        if not limit:
            return self._collect(request, [made])
        answer = self._answers.setdefault(request.request_id, _Answer())
        if answer.left + len(made) <= limit // 2:
            answer.left += len(made)
            return self._collect(request, [made])
        answer.held.append(made)
        while answer.left + sum(map(len, answer.held)) > limit:
            answer.held.remove(min(answer.held, key=lambda held: held.worth))
            self.counts["over_tokens_per_answer"] += 1
        return []

    def end(self, request: RolloutRequest, tokens: Sequence[int]) -> list[HiddenShard]:
        """The answer is complete -> the shards that the rest of it filled."""
        if request.purpose != "train":
            return []
        if self._is_left_out(request):
            self.counts["not_sampled"] += 1
            return []
        if self.config.source == "recompute":
            return self._collect(request, [self._tokens_alone(request, tokens)])
        answer = self._answers.pop(request.request_id, None)
        return self._collect(request, [] if answer is None else answer.held)

    def flush(self) -> list[HiddenShard]:
        """Writes what is there, full or not: the worker falls idle, or the policy changes."""
        return [shard for held_out in (False, True) for shard in self._write(held_out)]

    def _is_left_out(self, request: RolloutRequest) -> bool:
        return _share(request.request_id, "rate") >= self.config.sample_rate

    def _tokens_alone(self, request: RolloutRequest, tokens: Sequence[int]) -> Piece:
        """The last token was never read. Of an answer that is too long, some part: what comes before it is context, and
        not trained on."""
        sequence, prompt = [*request.prompt.tolist(), *tokens][:-1], request.prompt.length
        begin, end, limit = prompt, len(sequence), self.config.tokens_per_answer
        if limit and end > prompt + limit:
            begin = prompt + int(_share(request.request_id, "part") * (end - prompt - limit + 1))
            end = begin + limit
            self.counts["over_tokens_per_answer"] += 1
        mask = (torch.arange(end) >= begin).to(torch.uint8)
        ids = torch.tensor(sequence[:end], dtype=torch.int32)
        return Piece(Document(ids, torch.zeros(end, 0, dtype=torch.bfloat16), mask, 0, _group_of(request)))

    def _collect(self, request: RolloutRequest, pieces: list[Piece]) -> list[HiddenShard]:
        full: list[HiddenShard] = []
        if request.policy_version != self._version:
            full += self.flush()
        self._step, self._version = request.step, request.policy_version
        # by prompt: its other answers would give most of a held-out one away
        held_out = _share(request.group_id, "held out") < self.config.held_out_share
        self._pieces[held_out] += pieces
        if sum(map(len, self._pieces[held_out])) >= self.config.shard_tokens:
            full += self._write(held_out)
        return full

    def _write(self, held_out: bool) -> list[HiddenShard]:
        pieces, self._pieces[held_out] = self._pieces[held_out], []
        if not pieces:
            return []
        self._written += 1
        shard_id = f"v{self._version:06d}-{self.worker}-{self._incarnation}-{self._written:06d}"
        try:
            pieces = self._choose(pieces)
            if not pieces:
                return []
            blob = write_shard(self.store, [piece.document for piece in pieces], f"{shard_id}.safetensors")
        except (StorageError, BusError, BlobTooLarge) as error:
            self.counts["too_large" if isinstance(error, BlobTooLarge) else "not_written"] += len(pieces)
            _log.warning("hidden states dropped", shard=shard_id, why=str(error))
            return []
        tokens = sum(map(len, pieces))
        return [
            HiddenShard(
                shard_id=shard_id,
                blob=blob,
                slot=self.slot,
                step=self._step,
                policy_version=self._version,
                documents=len(pieces),
                tokens=tokens,
                held_out=held_out,
                worth=sum(piece.worth * len(piece) for piece in pieces) / tokens,
            )
        ]

    def _choose(self, pieces: list[Piece]) -> list[Piece]:
        """Of these, those worth most, as far as the store has room."""
        room = self.config.bytes_limit - self.store.bytes_used()
        chosen: list[Piece] = []
        for piece in sorted(pieces, key=lambda piece: -piece.worth):
            room -= _size(piece.document)
            if room < 0:
                break
            chosen.append(piece)
        if len(chosen) < len(pieces):
            self.counts["over_bytes_quota"] += len(pieces) - len(chosen)
        return chosen


def document_of(piece: FeaturePiece) -> Document:
    """Half a float32's precision is enough to learn from, and half its bytes."""
    length = piece.tokens_T.shape[0]
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[max(piece.answer_from - piece.start, 0) :] = 1
    tokens_T, features_TC = piece.tokens_T.to(torch.int32).cpu(), piece.features_TC.to(torch.bfloat16).cpu()
    return Document(tokens_T, features_TC, mask, piece.start, _group_of(piece.request))


def _size(document: Document) -> int:
    tensors = (document.token_ids, document.hidden, document.loss_mask)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _group_of(request: RolloutRequest) -> int:
    return int(_share(request.group_id, "group") * 2**63)


def _share(name: str, purpose: str) -> float:
    """A number in [0, 1) that belongs to the request, or to its group."""
    digest = hashlib.sha256(f"{purpose}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64
