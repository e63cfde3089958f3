"""Where an answer ends: a stop token, a stop string, or the length limit, token by token.

The end is looked for after every single token, so that it doesn't depend on how many were committed at once.
"""

from __future__ import annotations

from tlt_pipeline.messages import FinishReason, Sampling
from tlt_pipeline.models.tokenizer import Tokenizer


def find_end(
    answer: list[int], new: list[int], sampling: Sampling, tokenizer: Tokenizer
) -> tuple[int, FinishReason | None]:
    """-> (how many of `new` belong to the answer, why it ended there or None). The stop token and the tokens of a
    stop string belong to the answer."""
    room = sampling.max_new_tokens - len(answer)
    text = _StopText(answer, sampling, tokenizer) if sampling.stop else None
    for count, token in enumerate(new[:room], start=1):
        if token in sampling.stop_token_ids or (text is not None and text.ends_with(token)):
            return count, "stop"
        if count == room:
            return count, "length"
    return len(new), None


class _StopText:
    """Looks for stop strings in the last tokens only: as many as the longest string could span."""

    def __init__(self, answer: list[int], sampling: Sampling, tokenizer: Tokenizer) -> None:
        # a character can take several tokens (bytes of UTF-8), four at most
        self.window = 4 * max(len(text.encode()) for text in sampling.stop)
        self.tail = answer[-self.window :]
        self.stop, self.tokenizer = sampling.stop, tokenizer

    def ends_with(self, token: int) -> bool:
        self.tail = [*self.tail, token][-self.window :]
        text = self.tokenizer.decode(self.tail)
        return any(stop in text for stop in self.stop)
