"""Features on their way to drafter training, in pieces, while answers are still being written.

Shapes: T = positions of a piece, C = numbers of a token's features.
"""

from __future__ import annotations

from torch import Tensor

from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.results import FeaturePiece


class FeatureStream:
    def __init__(self, chunk: int | None) -> None:
        """`chunk`: tokens a piece; None: features are not wanted."""
        self.chunk = chunk
        self._pieces: list[FeaturePiece] = []

    def take(self) -> list[FeaturePiece]:
        taken, self._pieces = self._pieces, []
        return taken

    def advance(self, batch: Batch, row: int, last: bool) -> None:
        """Copies out what is there once it fills a piece, or at the answer's end."""
        start, length = batch.running[row].streamed, int(batch.lengths[row])
        if self.chunk is None or length == start or (length - start < self.chunk and not last):
            return
        self._add(batch, row, start, batch.features.read(row, start, length))

    def prompt(self, batch: Batch, row: int, features_TC: Tensor) -> None:
        """A prompt that is longer than what the ring keeps leaves at once, but for what the ring does keep."""
        while self.chunk is not None and len(features_TC) - batch.running[row].streamed > batch.features.length:
            start = batch.running[row].streamed
            self._add(batch, row, start, features_TC[start : start + self.chunk].clone())

    def skip(self, batch: Batch, row: int) -> None:
        """A sibling's prompt: what the ring no longer keeps has left with the answer that read it."""
        batch.running[row].streamed = max(int(batch.lengths[row]) - batch.features.length, 0)

    def _add(self, batch: Batch, row: int, start: int, features_TC: Tensor) -> None:
        # the piece's last feature predicts the token after it: that one goes along in the next piece's first pair
        running, end = batch.running[row], start + len(features_TC)
        self._pieces.append(
            FeaturePiece(
                request=running.request,
                start=start,
                tokens_T=batch.tokens_RL[row, start:end].clone(),
                features_TC=features_TC,
                answer_from=max(len(running.prompt), start),
                rejections=running.rejections,
            )
        )
        running.streamed, running.rejections = end, 0
