"""Proposals without a model: what followed the longest suffix of an answer where it stood before.

Before is in the answer itself, its prompt, the other answers of its group (also while they are being written), and
earlier answers, to the same prompt or another: one index a worker, which outlives steps and policy versions. After
prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), with LZ77's overlapping copies.
A place in another prompt's text counts the same: the longer match decides, then the later one. That brings more than
preferring the prompt's own (measured on recorded runs of reasoning tasks), and a prompt's first answer needs it.
Proposals may be anything, the policy's draw decides; here they are also the same in every run.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

SIZES = (16, 8, 4, 2, 1)
"""Lengths of suffixes that are looked up. More of them bring next to nothing, fewer than these lose (measured)."""
_END_BITS = 32


class NgramIndex:
    """The texts of running and earlier answers, and where each n-gram of them last stood.

    Keeps at most `token_limit` tokens: the texts that ended (or, prompts, were asked) longest ago go first; those of
    running answers always stay. Takes 4 bytes a token kept, 0.2 KB a text, and a table of fixed size: 8 to 16 bytes
    for each of `token_limit` tokens and each size, from the start (2^18 tokens: 16 MB). An n-gram has one place in the
    table and may lose it to another one; a place that doesn't hold the n-gram is no match.
    Inserting a token and proposing take a few microseconds each, whatever the lengths of texts. For one thread.
    """

    def __init__(self, token_limit: int, sizes: Sequence[int] = SIZES) -> None:
        """`sizes`: lengths of n-grams, each positive. Raises ValueError."""
        if token_limit < 1 or not sizes or min(sizes) < 1:
            raise ValueError(
                f"an n-gram index of {token_limit} tokens, sizes {tuple(sizes)}: give at least one of each, positive"
            )
        self._token_limit = token_limit
        self._sizes = tuple(sorted(set(sizes), reverse=True))
        slots = 1 << (token_limit * len(self._sizes) - 1).bit_length()
        self._mask = slots - 1
        # where an n-gram's last token ends: text number << _END_BITS | tokens before the one that follows
        self._places = array("q", [0]) * slots
        self._texts: dict[int, NgramText] = {}
        self._ended: OrderedDict[int, NgramText] = OrderedDict()
        self._prompts: dict[bytes, NgramText] = {}
        self._last_number = 0
        self.tokens = 0
        """Tokens kept."""

    def open(self, prompt: Sequence[int]) -> NgramText:
        """A new answer to that prompt."""
        key = array("i", prompt).tobytes()
        known = self._prompts.get(key)
        if known is None:
            text = self._add(())
            text.extend(prompt)
            self._prompts[key] = text
            text.close()
        else:
            self._ended.move_to_end(known.number)
        return self._add(prompt[-self._sizes[0] :])

    def _add(self, beginning: Sequence[int]) -> NgramText:
        self._last_number += 1
        text = self._texts[self._last_number] = NgramText(self, self._last_number, beginning)
        self.tokens += len(beginning)
        return text

    def _insert(self, number: int, tokens: tuple[int, ...], count: int, end: int) -> None:
        """`tokens`: the last `count` are new and stand at `end` and after; those before may begin n-grams. An n-gram
        gets its place once a token follows it: so a text's end never matches itself."""
        places, mask, sizes = self._places, self._mask, self._sizes
        base = (number << _END_BITS) + end - (len(tokens) - count)
        for stop in range(len(tokens) - count, len(tokens)):
            for size in sizes:
                if size <= stop:
                    places[hash(tokens[stop - size : stop]) & mask] = base + stop
        self.tokens += count
        if self.tokens > self._token_limit:
            self._drop_oldest()

    def _find(self, suffix: tuple[int, ...]) -> tuple[NgramText, int] | None:
        """-> where the longest end of `suffix` stood last: the text and the position of what followed."""
        places, mask, texts = self._places, self._mask, self._texts
        for size in self._sizes:
            ngram = suffix[-size:]
            if len(ngram) < size:
                continue
            place = places[hash(ngram) & mask]
            text = texts.get(place >> _END_BITS)
            if text is None:
                continue
            end = place & ((1 << _END_BITS) - 1)
            if tuple(text.tokens[end - size : end]) == ngram:
                return text, end
        return None

    def _end(self, text: NgramText) -> None:
        self._ended[text.number] = text
        if self.tokens > self._token_limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self.tokens > self._token_limit and self._ended:
            number, text = self._ended.popitem(last=False)
            del self._texts[number]
            self.tokens -= len(text.tokens)
            key = text.tokens.tobytes()
            if self._prompts.get(key) is text:  # not an answer that reads like a prompt
                del self._prompts[key]


class NgramText:
    """One answer with the end of its prompt. From NgramIndex.open."""

    __slots__ = ("_index", "_suffix", "number", "tokens")

    def __init__(self, index: NgramIndex, number: int, beginning: Sequence[int]) -> None:
        self._index = index
        self.number = number
        self.tokens = array("i", beginning)
        self._suffix = tuple(beginning)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were committed after the ones before."""
        known = self._suffix + tuple(tokens)
        end = len(self.tokens)
        self.tokens.extend(tokens)
        self._index._insert(self.number, known, len(tokens), end)
        self._suffix = known[-self._index._sizes[0] :]

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens that may come next; none without a match."""
        found = self._index._find(self._suffix)
        if found is None:
            return []
        text, end = found
        proposed = text.tokens[end : end + limit].tolist()
        if text is self and len(proposed) < limit:
            # the copy runs into what it writes: the text goes on with the same period
            period = len(proposed)
            proposed = [proposed[place % period] for place in range(limit)]
        return proposed

    def close(self) -> None:
        """The answer ended, or its attempt was given up: its text may be dropped when newer ones need the room."""
        self._index._end(self)
