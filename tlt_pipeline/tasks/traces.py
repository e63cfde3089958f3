"""Step-by-step answers for supervised training, written by program from reasoning-gym questions.

A trace shows the steps, then `#` and the answer. To teach a new task this way, add a function to `_WRITERS` that
takes the question and a `Slips` and returns the text.

    chain_sum   "12 + 5 - 3 ="   12+5=17-3=14#14                     running totals
    count_bits  "13"             13:1 6:1 3:2 1:3#3                  halved until 1: number, one bits so far

A share `slips` of the steps gets a wrong digit that the rest of the trace goes on with, like a solution written in a
hurry. A model trained on that prefers the right digit at every step but is unsure of it: greedy answers are right far
more often than sampled ones, which leaves reinforcement learning something to sharpen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

from tlt_pipeline.config import ReasoningGymSource
from tlt_pipeline.tasks.prompts import TaskError


class Slips:
    """Writes a number, wrong in one digit in a share of the calls."""

    def __init__(self, share: float, rng: Random) -> None:
        self._share = share
        self._rng = rng

    def __call__(self, value: int) -> int:
        if self._share == 0 or self._rng.random() >= self._share:
            return value
        digits = list(str(abs(value)))
        place = self._rng.randrange(len(digits))
        digits[place] = self._rng.choice([digit for digit in "0123456789" if digit != digits[place]])
        wrong = int("".join(digits))
        return -wrong if value < 0 else wrong


def write_trace(source: ReasoningGymSource, entry: str, slips: float = 0.0, rng: Random | None = None) -> str:
    """The supervised answer to an entry (Prompt.entry) of that source. Raises TaskError for a task without traces."""
    writer = _WRITERS.get(source.name)
    if writer is None:
        raise TaskError(
            f"there are no traces for reasoning-gym's {source.name!r} (only for {', '.join(sorted(_WRITERS))}): "
            f"give sft.data.path, or add a writer to tlt_pipeline/tasks/traces.py"
        )
    return writer(json.loads(entry)["question"], Slips(slips, rng or Random(0)))


def _chain_sum(question: str, slip: Slips) -> str:
    terms = re.findall(r"([+-]?) ?(-?\d+)(?= |$)", question.rpartition(": ")[2].removesuffix(" ="))
    total = int(terms[0][1])
    steps = [str(total)]
    for operator, number in terms[1:]:
        total = slip(total + int(number) if operator == "+" else total - int(number))
        steps.append(f"{operator}{number}={total}")
    return f"{''.join(steps)}#{total}"


def _count_bits(question: str, slip: Slips) -> str:
    found = re.search(r"number (\d+)", question)
    assert found is not None, question
    number = int(found.group(1))
    ones = number % 2
    steps = [f"{number}:{ones}"]
    while number > 1:
        number = max(1, slip(number // 2))
        ones += number % 2
        steps.append(f"{number}:{ones}")
    return f"{' '.join(steps)}#{ones}"


_WRITERS: dict[str, Callable[[str, Slips], str]] = {"chain_sum": _chain_sum, "count_bits": _count_bits}
