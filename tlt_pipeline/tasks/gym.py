"""Prompts from reasoning-gym: procedural tasks with their own verifiers.

reasoning-gym takes over a second to import, so it is imported at first use. An entry names the example by data
set seed and index, and the verifier makes it again from those: metadata of any type reaches `score_answer`
unchanged.
"""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from importlib import import_module
from typing import Any

from tlt_pipeline.config import ReasoningGymSource
from tlt_pipeline.tasks.prompts import Prompt, TaskError, compile_pattern

CHUNK = 10_000
"""Examples a data set instance; the next chunk is another instance with another seed. Some data sets of
reasoning-gym work in proportion to their size, and one refuses more than 20,000."""

HELD_OUT_SEED = 0


class GymPrompts:
    """Examples of one reasoning-gym source; `seed` picks which. Item i of a data set is drawn from
    `Random(seed + i)`, so chunks are `CHUNK` seeds apart."""

    def __init__(self, label: str, source: ReasoningGymSource, seed: int, held_out: int) -> None:
        reserved = sorted({"seed", "size"} & source.params.keys())
        if reserved:
            raise TaskError(f"params of task source {label!r} set {reserved[0]!r}, which the run decides: remove it")
        self.label = label
        self._params = json.dumps(source.params, sort_keys=True)
        self._source = source
        self._first_seed = (1 << 20) + (seed % (1 << 20)) * (1 << 31)
        self.held_out = [self._prompt(HELD_OUT_SEED, index, index) for index in range(held_out)]
        self._kept_apart = {prompt.question for prompt in self.held_out}

    def at(self, position: int) -> Prompt:
        """The training prompt at a position, a pure function of it. One whose question is held out is
        replaced by the next free one of the same chunk."""
        chunk, offset = divmod(position, CHUNK)
        seed = self._first_seed + chunk * CHUNK
        for step in range(CHUNK):
            prompt = self._prompt(seed, (offset + step) % CHUNK, position)
            if prompt.question not in self._kept_apart:
                return prompt
        raise TaskError(
            f"every question of task source {self.label!r} is held out: lower task.held_out or widen its params"
        )

    def _prompt(self, seed: int, index: int, position: int) -> Prompt:
        item = load_dataset(self._source.name, self._params, seed)[index]
        question, answer = str(item["question"]), str(item["answer"])
        entry = json.dumps({"seed": seed, "index": index, "question": question, "answer": answer})
        return Prompt(self.label, position, self._shorten(question), None, answer, entry)

    def _shorten(self, question: str) -> str:
        pattern = self._source.question_pattern
        if pattern is None:
            return question
        match = compile_pattern(pattern, f"question_pattern of task source {self.label!r}").search(question)
        if match is None:
            raise TaskError(
                f"question_pattern {pattern!r} of task source {self.label!r} does not match the question "
                f"{question[:120]!r}: change the pattern"
            )
        return match.group(1) or ""


@lru_cache(maxsize=32)
def load_dataset(name: str, params: str, seed: int) -> Any:
    """The reasoning-gym data set of that name; `params` is JSON. Raises TaskError if there is none or it
    refuses."""
    library: Any = import_module("reasoning_gym")
    names: list[str] = list(library.factory.DATASETS)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"{len(names)} are known, such as chain_sum"
        raise TaskError(f"reasoning-gym has no data set {name!r}; {hint}")
    settings = {"size": CHUNK, **json.loads(params), "seed": seed}
    try:
        return library.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise TaskError(f"reasoning-gym data set {name!r} refuses its params {params}: {text}") from error
