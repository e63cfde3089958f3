"""The mix of task sources that a run draws its prompts from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Protocol

from tlt_pipeline.config import FileSource, ReasoningGymSource, Source, TaskConfig
from tlt_pipeline.tasks.gym import GymPrompts
from tlt_pipeline.tasks.prompts import Prompt, TaskError, compile_pattern


class PromptSource(Protocol):
    """Examples of one source. `held_out` is the same for every seed and never comes out of `at`."""

    label: str
    held_out: list[Prompt]

    def at(self, position: int) -> Prompt: ...


class TaskMix:
    """Prompts of all sources, mixed by weight. What step s gets is a pure function of (seed, s, count), so a
    resumed run goes on with the same prompts.

    Shares are kept within each step (systematic sampling: a source of weight share p gets floor or ceil of
    p * count of every step's prompts), because a mean reward over a fixed mix is less noisy than over a drawn
    one. Each source is walked in order; a file is shuffled anew each epoch.

    Raises TaskError: duplicate labels, a template without `{question}`, a pattern without a group, whatever
    the sources refuse."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        if "{question}" not in config.prompt_template:
            raise TaskError("task.prompt_template has no {question}: the model would never see the question")
        compile_pattern(config.answer_pattern, "task.answer_pattern")
        self._seed = seed
        weights = [source.weight for source in config.sources]
        self._edges = [edge / sum(weights) for edge in accumulate(weights)]
        shares = _split(config.held_out, self._edges, 0.5)
        self.sources: list[PromptSource] = [
            _open(label, source, _number(seed, "source", label), held_out)
            for (label, source), held_out in zip(labelled_sources(config).items(), shares, strict=True)
        ]
        self._drawn: dict[int, list[list[int]]] = {}

    def draw(self, step: int, count: int) -> list[Prompt]:
        """The `count` prompts of step `step` (0-based), in an order mixed over the sources."""
        starts, counts = self._starts(step, count), self._counts(step, count)
        prompts = [
            source.at(start + offset)
            for source, start, of_source in zip(self.sources, starts, counts, strict=True)
            for offset in range(of_source)
        ]
        Random(_number(self._seed, "order", step)).shuffle(prompts)
        return prompts

    def held_out(self) -> list[Prompt]:
        """The evaluation prompts, the same for every seed; `draw` never returns one of them."""
        return [prompt for source in self.sources for prompt in source.held_out]

    def _counts(self, step: int, count: int) -> list[int]:
        return _split(count, self._edges, Random(_number(self._seed, "mix", step)).random())

    def _starts(self, step: int, count: int) -> list[int]:
        """How many prompts of each source came before this step."""
        starts = self._drawn.setdefault(count, [[0] * len(self.sources)])
        while len(starts) <= step:
            counts = self._counts(len(starts) - 1, count)
            starts.append([before + more for before, more in zip(starts[-1], counts, strict=True)])
        return starts[step]


def labelled_sources(config: TaskConfig) -> dict[str, Source]:
    """Sources by label: by default reasoning-gym's name, or the file's path. Raises TaskError on a
    duplicate."""
    labelled: dict[str, Source] = {}
    for source in config.sources:
        label = source.label or (source.name if isinstance(source, ReasoningGymSource) else source.path)
        if label in labelled:
            raise TaskError(f"two task sources are called {label!r}: give each its own label")
        labelled[label] = source
    return labelled


def _open(label: str, source: Source, seed: int, held_out: int) -> PromptSource:
    if isinstance(source, FileSource):
        from tlt_pipeline.tasks.files import FilePrompts

        return FilePrompts(label, source, seed, held_out)
    return GymPrompts(label, source, seed, held_out)


def _split(count: int, edges: Sequence[float], phase: float) -> list[int]:
    """Shares `count` out over the sources; `phase` in [0, 1) decides who gets the remainders."""
    marks = [0, *(int(edge * count + phase) for edge in edges[:-1]), count]
    return [high - low for low, high in pairwise(marks)]


def _number(seed: int, *parts: object) -> int:
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
