"""Scoring one answer. This runs in the verifier pool's processes; nothing here may import torch."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tlt_pipeline.config import FileSource, Source
from tlt_pipeline.tasks.gym import load_dataset
from tlt_pipeline.tasks.prompts import TaskError

Verifier = Callable[[str, dict[str, Any]], float]
"""(answer found in the text, the file's row) -> reward."""


def score_answer(source: Source, answer: str, entry: str) -> float:
    """Reward of an extracted answer; `entry` is Prompt.entry. Raises whatever the verifier raises, and
    TypeError or ValueError where it returns no finite number."""
    known = json.loads(entry)
    if isinstance(source, FileSource):
        reward = _file_verifier(source.verifier)(answer, known)
    else:
        dataset = load_dataset(source.name, json.dumps(source.params, sort_keys=True), known["seed"])
        item = dataset[known["index"]]
        if str(item["question"]) != known["question"]:
            raise TaskError(
                f"{source.name} {known['index']} is another question now: reasoning-gym's version has changed"
            )
        reward = dataset.score_answer(answer, item)
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the verifier returned {number}")
    return number


def check_verifier(label: str, name: str) -> None:
    """Raises TaskError for a verifier that isn't there, before a run starts. The user's own is looked for,
    not run."""
    if name in _BUILT_IN:
        if name == "math_verify" and importlib.util.find_spec("math_verify") is None:
            raise TaskError(f"verifier math_verify of {label!r} isn't installed: pip install 'tlt-pipeline[math]'")
        return
    module, separator, function = name.partition(":")
    if not separator or not function:
        near = difflib.get_close_matches(name, _BUILT_IN, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"give {', '.join(_BUILT_IN)} or module:function"
        raise TaskError(f"task source {label!r} has no verifier {name!r}; {hint}")
    _see_working_directory()
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:
        found = False
    if not found:
        raise TaskError(
            f"module {module!r} of verifier {name!r} is not on the Python path: install it, or run where it lies"
        )


def exact(answer: str, entry: dict[str, Any]) -> float:
    """1 where the answer is the expected one, blanks around it aside."""
    return float(answer.strip() == entry["answer"].strip())


def regex(answer: str, entry: dict[str, Any]) -> float:
    """1 where the row's answer, a regular expression, matches all of the given one."""
    return float(re.fullmatch(entry["answer"], answer.strip()) is not None)


def math_verify(answer: str, entry: dict[str, Any]) -> float:
    """1 where math-verify finds both mathematically equal. Its own time limits are off: the pool has one."""
    library: Any = importlib.import_module("math_verify")
    gold = library.parse(entry["answer"], parsing_timeout=None)
    given = library.parse(answer, parsing_timeout=None)
    return float(library.verify(gold, given, timeout_seconds=None))


_BUILT_IN: dict[str, Verifier] = {"math_verify": math_verify, "exact": exact, "regex": regex}


@lru_cache
def _file_verifier(name: str) -> Verifier:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    _see_working_directory()
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _see_working_directory() -> None:
    """`module:function` may lie where the run was started; a console script doesn't look there by itself."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
