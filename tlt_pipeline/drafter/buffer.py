"""The drafter's training data: bounded, outliving steps, held-out documents apart.

Documents come with the policy version that wrote them. Age is counted in those versions (one an RL step): the newest
`keep_steps` of them stay, so that a lease at the start of a step still trains on the step before, whose long answers
the current one doesn't have yet. Above the byte limit the oldest go first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tlt_pipeline.drafter.batching import count_pairs
from tlt_pipeline.drafter.shards import Document


@dataclass(frozen=True, eq=False)
class _Entry:
    document: Document
    policy_version: int

    @property
    def size(self) -> int:
        hidden = self.document.hidden
        return hidden.numel() * hidden.element_size()


class DocumentBuffer:
    """Training documents are drawn in shuffled epochs, new ones first; held-out ones are only looked at."""

    def __init__(self, *, keep_steps: int, byte_limit: int, held_out_share: float, seed: int) -> None:
        self._keep_steps = keep_steps
        self._byte_limit = byte_limit
        self._held_out_share = held_out_share
        self._random = random.Random(seed)
        self._training: list[_Entry] = []
        self._held_out: list[_Entry] = []
        self._queue: deque[_Entry] = deque()
        self.newest_version = -1
        self.held_out_changes = 0
        """Grows when the held-out set changes: what was measured on it before no longer compares."""

    def __len__(self) -> int:
        return len(self._training)

    @property
    def documents(self) -> Iterator[Document]:
        """All of them, held-out ones too."""
        return (entry.document for entry in (*self._training, *self._held_out))

    @property
    def oldest_version(self) -> int:
        """Of what the buffer takes: older data is useless to it."""
        return self.newest_version - self._keep_steps + 1

    @property
    def bytes_used(self) -> int:
        return sum(entry.size for entry in (*self._training, *self._held_out))

    def add(self, documents: Sequence[Document], policy_version: int, held_out: bool) -> int:
        """Takes the documents that have a pair to learn from; returns how many, 0 for data that is too old.

        While no held-out document is there, a share of the training ones becomes held-out: without any, no version
        could be judged."""
        if policy_version < self.oldest_version:
            return 0
        useful = [document for document in documents if count_pairs(document) > 0]
        entries = [_Entry(document, policy_version) for document in useful]
        if not held_out and not self._held_out and len(entries) > 1:
            apart = max(1, round(len(entries) * self._held_out_share))
            self._add_held_out(entries[:apart])
            entries = entries[apart:]
        if held_out:
            self._add_held_out(entries)
        else:
            self._training += entries
            fresh = list(entries)
            self._random.shuffle(fresh)
            self._queue.extendleft(fresh)
        self.newest_version = max(self.newest_version, policy_version)
        self._evict()
        return len(useful)

    def draw(self, tokens: int) -> list[Document]:
        """Different documents of at most `tokens` tokens, but at least one. [] if there are none."""
        drawn: list[Document] = []
        size = 0
        while self._training:
            if not self._queue:
                if drawn:
                    break
                self._queue.extend(self._random.sample(self._training, len(self._training)))
            document = self._queue[0].document
            if drawn and size + len(document) > tokens:
                break
            drawn.append(document)
            size += len(document)
            self._queue.popleft()
        return drawn

    def held_out(self, tokens: int) -> list[Document]:
        """The same documents at each call until `held_out_changes` grows: about `tokens` tokens, taken in turn from
        each policy version, the newest first, so that many prompts are among them."""
        by_version: dict[int, list[Document]] = {}
        for entry in sorted(self._held_out, key=lambda entry: -entry.policy_version):
            by_version.setdefault(entry.policy_version, []).append(entry.document)
        order = random.Random(0)
        for documents in by_version.values():
            order.shuffle(documents)
        chosen: list[Document] = []
        size = 0
        for documents in zip_longest(*by_version.values()):
            for document in documents:
                if document is None:
                    continue
                if chosen and size + len(document) > tokens:
                    return chosen
                chosen.append(document)
                size += len(document)
        return chosen

    def _add_held_out(self, entries: list[_Entry]) -> None:
        if entries:
            self._held_out += entries
            self.held_out_changes += 1

    def _evict(self) -> None:
        """What is too old, then the oldest above the byte limit, training documents before held-out ones."""
        oldest = self.oldest_version
        training = [entry for entry in self._training if entry.policy_version >= oldest]
        held_out = [entry for entry in self._held_out if entry.policy_version >= oldest]
        excess = sum(entry.size for entry in (*training, *held_out)) - self._byte_limit
        training, excess = _drop_oldest(training, excess)
        held_out, excess = _drop_oldest(held_out, excess)
        if len(held_out) < len(self._held_out):
            self.held_out_changes += 1
        if len(training) < len(self._training):
            alive = set(map(id, training))
            self._queue = deque(entry for entry in self._queue if id(entry) in alive)
        self._training, self._held_out = training, held_out


def _drop_oldest(entries: list[_Entry], excess: int) -> tuple[list[_Entry], int]:
    """All but one may go -> what stays, and the bytes still too many."""
    kept = sorted(entries, key=lambda entry: entry.policy_version)
    gone = 0
    while excess > 0 and gone < len(kept) - 1:
        excess -= kept[gone].size
        gone += 1
    return kept[gone:], excess
