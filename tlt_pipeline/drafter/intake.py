"""Shards into the buffer: each once, what can't be used dropped with a counted reason."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf

import structlog

from tlt_pipeline.blobs import BlobCorrupt, BlobMissing, BlobStore
from tlt_pipeline.bus import BusError
from tlt_pipeline.config import RunConfig
from tlt_pipeline.drafter.batching import cut
from tlt_pipeline.drafter.buffer import DocumentBuffer
from tlt_pipeline.drafter.recomputing import lacks_states, recompute
from tlt_pipeline.drafter.shards import Document, ShardInvalid, read_shard
from tlt_pipeline.messages import HiddenShard
from tlt_pipeline.models.decoder import Decoder, DecoderConfig
from tlt_pipeline.weights import WeightsMissing

_REASONS = {
    BlobMissing: "missing",
    BlobCorrupt: "corrupt",
    BusError: "unreachable",
    WeightsMissing: "policy_missing",
}
_log = structlog.get_logger("tlt.drafter")


class ShardIntake:
    """`counts`: shards by what became of them: read, known, too_old, missing, corrupt,
    unreachable, policy_missing, invalid."""

    def __init__(
        self,
        store: BlobStore,
        buffer: DocumentBuffer,
        policy: DecoderConfig,
        config: RunConfig,
        load_policy: Callable[[int], Decoder],
        taps: tuple[int, ...] = (),
    ) -> None:
        """`load_policy`: of a version, to recompute states with; raises WeightsMissing. `taps`: layers of the policy
        that the drafter reads."""
        self._store, self._buffer, self._policy = store, buffer, policy
        self._longest = config.drafter.train.tokens_per_batch
        self._tokens_per_answer = config.hidden_states.tokens_per_answer
        self._load_policy, self._taps = load_policy, taps
        self._loaded: tuple[int, Decoder] | None = None
        self._known: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    def take(
        self, shards: Iterable[HiddenShard], seconds: float = inf, should_stop: Callable[[], bool] = lambda: False
    ) -> list[HiddenShard]:
        """Reads those that weren't seen before, older ones first, for about `seconds` or until stopped; -> the rest."""
        left = sorted(shards, key=lambda shard: shard.policy_version)
        until = time.monotonic() + seconds
        while left and time.monotonic() < until and not should_stop():
            if not self._take(left[0], should_stop):
                break
            del left[0]
        return left

    def free(self) -> None:
        """Forgets the policy that states were recomputed with: its memory is needed elsewhere."""
        self._loaded = None

    def _take(self, shard: HiddenShard, should_stop: Callable[[], bool]) -> bool:
        """False: stopped in the middle, to be taken again."""
        if shard.shard_id in self._known:
            self.counts["known"] += 1
            return True
        if shard.policy_version < self._buffer.oldest_version:
            self.counts["too_old"] += 1
            return True
        try:
            documents = self._read(shard, should_stop)
        except (BlobMissing, BlobCorrupt, BusError, ShardInvalid, WeightsMissing) as error:
            reason = _REASONS.get(type(error), "invalid")
            self.counts[reason] += 1
            self._known[shard.shard_id] = shard.policy_version
            _log.warning("shard dropped", shard=shard.shard_id, reason=reason, why=str(error))
            return True
        if documents is None:
            return False
        self.counts["read"] += 1
        self._known[shard.shard_id] = shard.policy_version
        pieces = [piece for document in documents for piece in cut(document, self._longest)]
        self._buffer.add(pieces, shard.policy_version, shard.held_out)
        self._forget_old()
        return True

    def _read(self, shard: HiddenShard, should_stop: Callable[[], bool]) -> list[Document] | None:
        documents = read_shard(self._store, shard.blob)
        self._check(documents)
        if not lacks_states(documents):
            return documents
        if self._loaded is None or self._loaded[0] != shard.policy_version:
            self._loaded = None  # one at a time in memory
            self._loaded = shard.policy_version, self._load_policy(shard.policy_version)
        return recompute(
            self._loaded[1],
            documents,
            tokens_at_once=self._longest,
            tokens_per_answer=self._tokens_per_answer,
            taps=self._taps,
            should_stop=should_stop,
        )

    def _check(self, documents: list[Document]) -> None:
        """Raises ShardInvalid for what is not of this policy: it would be an index error in the trainer."""
        policy, recomputing = self._policy, lacks_states(documents)
        size, wanted = documents[0].hidden.shape[1], (len(self._taps) + 1) * policy.hidden_size
        if not recomputing and size != wanted:
            raise ShardInvalid(f"features of size {size}, the policy's have {wanted}")
        for document in documents:
            if recomputing and document.position:
                raise ShardInvalid(f"a document without states begins at position {document.position}")
            if int(document.token_ids.max()) >= policy.vocab_size:
                raise ShardInvalid(f"token id {int(document.token_ids.max())} of {policy.vocab_size}")
            if document.position + len(document) > policy.max_position_embeddings:
                raise ShardInvalid(f"a document ends behind position {policy.max_position_embeddings}")

    def _forget_old(self) -> None:
        oldest = self._buffer.oldest_version
        self._known = {name: version for name, version in self._known.items() if version >= oldest}
