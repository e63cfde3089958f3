"""Step-by-step answers for supervised training, written by program from reasoning-gym questions.

A trace shows the steps, then `#` and the answer. To teach a new task this way, add a function to `_WRITERS` that
takes the question and a `Slips` and returns the text.

    chain_sum, basic_arithmetic   "12 + 5 - 3 ="   12+5=17-3=14#14              running totals
    count_bits                    "13"             13:01 06:01 03:02 01:03#3    halved until 1: number, ones so far

A share `slips` of the steps gets a wrong digit that the rest of the trace goes on with, like a solution written in a
hurry. A model trained on that prefers the right digit at every step but is unsure of it: greedy answers are right far
more often than sampled ones, which leaves reinforcement learning something to sharpen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

from tlt_pipeline.config import ReasoningGymSource, Source
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


def write_trace(source: Source, entry: str, slips: float = 0.0, rng: Random | None = None) -> str:
    """The supervised answer to an entry (Prompt.entry) of that source. Raises TaskError for a task without
    traces."""
    name = source.name if isinstance(source, ReasoningGymSource) else source.path
    writer = _WRITERS.get(name)
    if writer is None:
        raise TaskError(
            f"there are no traces for {name!r}, only for reasoning-gym's {', '.join(sorted(_WRITERS))}: "
            f"give sft.data.path, or add a writer to tlt_pipeline/tasks/traces.py"
        )
    return writer(json.loads(entry)["question"], Slips(slips, rng or Random(0)))


def _chain_sum(question: str, slip: Slips) -> str:
    terms = re.findall(r"(?:([+-]) )?(-?\d+)(?= |$)", _expression(question))
    total = int(terms[0][1])
    steps = [str(total)]
    for operator, number in terms[1:]:
        total = slip(total + int(number) if operator == "+" else total - int(number))
        steps.append(f"{operator}{number}={total}")
    return f"{''.join(steps)}#{total}"


def _expression(question: str) -> str:
    """The sum in "…problem: 4 - 1 =" (chain_sum) or "Calculate 4 - 1." (basic_arithmetic)."""
    return question.rpartition(": ")[2].removesuffix(" =").removeprefix("Calculate ").removesuffix(".")


def _count_bits(question: str, slip: Slips) -> str:
    found = re.search(r"number (\d+)", question)
    assert found is not None, question
    number = int(found.group(1))
    ones, width = number % 2, len(str(number))
    steps = [f"{number}:{ones:02d}"]
    while number > 1:
        number = max(1, slip(number // 2))
        ones += number % 2
        steps.append(f"{number:0{width}d}:{ones:02d}")
    return f"{' '.join(steps)}#{ones}"


_WRITERS: dict[str, Callable[[str, Slips], str]] = {
    "chain_sum": _chain_sum,
    "basic_arithmetic": _chain_sum,
    "count_bits": _count_bits,
}
