"""Shards into the buffer: each once, what can't be used dropped with a counted reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import structlog

from tlt_pipeline.blobs import BlobCorrupt, BlobMissing, BlobStore
from tlt_pipeline.drafter.batching import cut
from tlt_pipeline.drafter.buffer import DocumentBuffer
from tlt_pipeline.drafter.shards import Document, ShardInvalid, read_shard
from tlt_pipeline.messages import HiddenShard
from tlt_pipeline.models.decoder import DecoderConfig

_log = structlog.get_logger("tlt.drafter")


class ShardIntake:
    """`counts`: shards by what became of them: read, known, too_old, missing, corrupt, invalid."""

    def __init__(self, store: BlobStore, buffer: DocumentBuffer, policy: DecoderConfig, longest: int) -> None:
        """`longest`: documents above so many tokens are cut."""
        self._store, self._buffer, self._policy, self._longest = store, buffer, policy, longest
        self._known: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    def take(self, shards: Iterable[HiddenShard]) -> int:
        """Reads those that weren't seen before; how many documents the buffer took."""
        return sum(self._take(shard) for shard in sorted(shards, key=lambda shard: shard.policy_version))

    def _take(self, shard: HiddenShard) -> int:
        if shard.shard_id in self._known:
            self.counts["known"] += 1
            return 0
        if shard.policy_version < self._buffer.oldest_version:
            self.counts["too_old"] += 1
            return 0
        self._known[shard.shard_id] = shard.policy_version
        try:
            documents = read_shard(self._store, shard.blob)
            self._check(documents)
        except (BlobMissing, BlobCorrupt, ShardInvalid) as error:
            reason = {BlobMissing: "missing", BlobCorrupt: "corrupt"}.get(type(error), "invalid")
            self.counts[reason] += 1
            _log.warning("shard dropped", shard=shard.shard_id, reason=reason, why=str(error))
            return 0
        self.counts["read"] += 1
        pieces = [piece for document in documents for piece in cut(document, self._longest)]
        taken = self._buffer.add(pieces, shard.policy_version, shard.held_out)
        self._forget_old()
        return taken

    def _check(self, documents: list[Document]) -> None:
        """Raises ShardInvalid for what is not of this policy: it would be an index error in the trainer."""
        policy = self._policy
        if documents[0].hidden.shape[1] != policy.hidden_size:
            raise ShardInvalid(
                f"features of size {documents[0].hidden.shape[1]}, the policy's have {policy.hidden_size}"
            )
        for document in documents:
            if int(document.token_ids.max()) >= policy.vocab_size:
                raise ShardInvalid(f"token id {int(document.token_ids.max())} of {policy.vocab_size}")
            if document.position + len(document) > policy.max_position_embeddings:
                raise ShardInvalid(f"a document ends behind position {policy.max_position_embeddings}")

    def _forget_old(self) -> None:
        oldest = self._buffer.oldest_version
        self._known = {name: version for name, version in self._known.items() if version >= oldest}
