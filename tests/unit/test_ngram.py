"""The model-free proposer: what it finds, what it can't, and that it stays within its bounds."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from tlt_pipeline.engine.ngram import NgramIndex

PROMPT = [1, 2, 3, 4]


def index(token_limit: int = 1 << 12, sizes: tuple[int, ...] = (4, 3, 2)) -> NgramIndex:
    return NgramIndex(token_limit, sizes)


def write(ngrams: NgramIndex, prompt: list[int], answer: list[int]) -> None:
    text = ngrams.open(prompt)
    for token in answer:
        text.extend([token])
    text.close()


def longest_match(texts: list[list[int]], own: list[int], sizes: tuple[int, ...]) -> int:
    """The slow way: the longest size at which the end of `own` stands before some token of the texts."""
    for size in sorted(sizes, reverse=True):
        for text in texts:
            ends = range(size, len(text))
            if size <= len(own) and any(text[end - size : end] == own[-size:] for end in ends):
                return size
    return 0


def test_a_first_answer_finds_its_prompt() -> None:
    text = index().open([5, 6, 7, 8, 9, 5, 6])
    assert text.propose(3) == [7, 8, 9]
    assert index().open([5, 6, 7]).propose(3) == [], "an end doesn't match itself"


def test_it_finds_its_own_text() -> None:
    text = index().open(PROMPT)
    text.extend([10, 11, 12, 13])
    assert text.propose(4) == []
    text.extend([10, 11])
    assert text.propose(2) == [12, 13]


def test_an_ngram_may_begin_in_the_prompt() -> None:
    ngrams = index()
    ngrams.open(PROMPT).extend([20, 21, 22])
    sibling = ngrams.open(PROMPT)
    assert sibling.propose(2) == [20, 21]


def test_siblings_find_what_is_still_being_written() -> None:
    ngrams = index()
    first, second = ngrams.open(PROMPT), ngrams.open(PROMPT)
    first.extend([30, 31, 32])
    second.extend([30])
    assert second.propose(8) == [31, 32]
    first.extend([33])
    assert second.propose(8) == [31, 32, 33]


def test_earlier_answers_are_found_whoever_asked() -> None:
    ngrams = index()
    write(ngrams, PROMPT, [40, 41, 42, 43])
    assert ngrams.open(PROMPT).propose(3) == [40, 41, 42]
    other = ngrams.open([9, 9, 9])
    other.extend([41, 42])
    assert other.propose(3) == [43]


def test_the_longer_match_counts_and_then_the_later() -> None:
    ngrams = index()
    write(ngrams, PROMPT, [50, 51, 52, 60])
    write(ngrams, PROMPT, [7, 51, 52, 61])
    text = ngrams.open(PROMPT)
    text.extend([51, 52])
    assert text.propose(1) == [61]
    text = ngrams.open(PROMPT)
    text.extend([50, 51, 52])
    assert text.propose(1) == [60]


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_pattern_goes_on(period: int) -> None:
    text = index().open(PROMPT)
    pattern = [70 + place for place in range(period)]
    text.extend((pattern * 8)[: 4 * period])
    assert text.propose(7) == (pattern * 8)[:7]


def test_the_same_tokens_in_one_piece_or_many() -> None:
    random = Random(0)
    tokens = [random.randrange(4) for _ in range(300)]
    whole, pieces = index().open(PROMPT), index().open(PROMPT)
    whole.extend(tokens)
    place = 0
    while place < len(tokens):
        count = random.randint(1, 9)
        pieces.extend(tokens[place : place + count])
        place += count
    assert pieces.propose(16) == whole.propose(16)


@pytest.mark.parametrize("seed", range(8))
def test_proposals_follow_a_longest_match(seed: int) -> None:
    """Against the slow way, on random texts of few letters."""
    random = Random(seed)
    sizes = (4, 2, 1)
    ngrams = index(1 << 18, sizes)  # so large that none loses its place to another
    prompts = [[random.randrange(6) for _ in range(random.randrange(6))] for _ in range(3)]
    open_texts = [(ngrams.open(prompt), list(prompt)) for prompt in prompts for _ in range(2)]
    for _ in range(150):
        text, tokens = random.choice(open_texts)
        new = [random.randrange(6) for _ in range(random.randint(1, 3))]
        text.extend(new)
        tokens += new
        texts = [each for _, each in open_texts]
        proposed, size = text.propose(3), longest_match(texts, tokens, sizes)
        assert bool(proposed) == (size > 0)
        if proposed:
            sequence = tokens[len(tokens) - size :] + proposed[:1]
            assert any(sequence == each[i : i + size + 1] for each in texts for i in range(len(each)))


def test_it_is_the_same_in_every_run() -> None:
    def run() -> list[list[int]]:
        random = Random(3)
        ngrams = index(200)
        proposed = []
        for _ in range(40):
            text = ngrams.open([random.randrange(3) for _ in range(4)])
            for _ in range(20):
                text.extend([random.randrange(5)])
                proposed.append(text.propose(4))
            text.close()
        return proposed

    assert run() == run()


def test_it_stays_within_its_limit_and_the_oldest_texts_go() -> None:
    ngrams = index(100)
    for number in range(50):
        first = 100 * (number + 1)
        write(ngrams, [first, first + 1], list(range(first + 2, first + 20)))
        assert ngrams.tokens <= 100
    assert ngrams.open([100, 101]).propose(1) == []
    assert ngrams.open([5000, 5001]).propose(2) == [5002, 5003]


def test_running_answers_are_never_dropped() -> None:
    ngrams = index(64)
    running = ngrams.open(PROMPT)
    running.extend(range(100, 300))
    write(ngrams, [7, 8], [9, 10, 11])
    assert ngrams.tokens == len(PROMPT) + 200
    other = ngrams.open([298, 299])
    running.extend([300])
    assert other.propose(2) == [300]
    other.close()
    running.close()
    assert ngrams.tokens <= 64
    assert other.propose(2) == []


def test_a_prompt_that_was_dropped_can_come_again() -> None:
    ngrams = index(40)
    prompt = [5, 6, 7, 8, 9, 5, 6]
    ngrams.open(prompt).close()
    write(ngrams, [1], list(range(100, 160)))
    assert ngrams.open(prompt).propose(2) == [7, 8]


def test_collisions_are_no_matches() -> None:
    """A table far too small for its n-grams: whatever is proposed did follow."""
    random = Random(1)
    ngrams = NgramIndex(8, (2,))
    text = ngrams.open([])
    tokens = [random.randrange(50) for _ in range(2000)]
    found = 0
    for place, token in enumerate(tokens):
        text.extend([token])
        proposed = text.propose(1)
        if proposed:
            found += 1
            sequence = tokens[place - 1 : place + 1] + proposed
            assert any(sequence == tokens[i : i + 3] for i in range(place))
    assert found


def test_memory_is_what_the_docstring_says() -> None:
    random = Random(2)
    tracemalloc.start()
    try:
        limit = 1 << 13
        ngrams = NgramIndex(limit)
        for _ in range(16):
            text = ngrams.open([random.randrange(50_000) for _ in range(100)])
            text.extend([random.randrange(50_000) for _ in range(500)])
            text.close()
        bytes_taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert limit - 700 < ngrams.tokens <= limit
    assert bytes_taken / limit < 5 * 16 + 4 + 4, "the table, the tokens, and what a text takes"


def test_an_index_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        NgramIndex(0)
    with pytest.raises(ValueError, match="positive"):
        NgramIndex(10, (3, 0))
