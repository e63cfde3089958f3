"""What a finished run says: the numbers of summary.json as a compact table, and the commands that come next."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_CLAIMS = {
    "exact": "answers don't depend on drafters, batches or crashes, to the bit",
    "float32": "answers are the same up to ties, about 1 token in 100,000",
    "distribution": "answers are equally distributed",
}
_BARS = "▁▂▃▄▅▆▇█"


def print_summary(summary: Mapping[str, Any], run_dir: Path, console: Console) -> None:
    """Table, run directory, next commands. Plain text where the console is no terminal."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for label, value in summary_rows(summary):
        table.add_row(label, value)
    console.print(table)
    console.print(f"run directory  {run_dir}", soft_wrap=True, highlight=False)
    for about, command in next_commands(run_dir):
        console.print(f"{about:<15}{command}", soft_wrap=True, highlight=False)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    s = summary
    rewards = [float(value) for value in s["reward_by_step"]]
    unscored = f", {s['unverified']} without a verdict (see logs/rollout-*.log)" if s.get("unverified") else ""
    return [
        ("steps", f"{s['steps']}, policy version {s['policy_version']}"),
        ("reward", f"{s['reward_first']:.3f} → {s['reward_last']:.3f}  {sparkline(rewards)} (ends: means of 3 steps)"),
        (
            "drafter",
            f"{s['drafter_versions_published']} versions, acceptance length "
            f"{s['acceptance_length_first']:.2f} → {s['acceptance_length_last']:.2f}",
        ),
        ("time", f"{s['step_s']:.1f} s in steps: {s['rollout_s']:.1f} s rollout, {s['learner_s']:.1f} s learner"),
        *spot_rows(s),
        (
            "answers",
            f"{s['requests_trained']} trained of {s['requests_admitted']}, {s['dead_letters']} dead letters{unscored}",
        ),
        ("claim", f"{s['claim']}: {_CLAIMS.get(s['claim'], '')}"),
        ("answer length", f"p50 {s['answer_length_p50']}, p99 {s['answer_length_p99']} tokens"),
    ]


def spot_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What idle slots did, from `scheduling.spot.spot_facts`; of a summary written before those facts, what it has."""
    idle, used = float(facts["slot_idle_s"]), float(facts["slot_idle_used_s"])
    share = f", {used / idle:.0%} of it used for the drafter" if idle else ""
    unused = _largest(facts.get("slot_idle_unused_s", {}), ".1f").replace(" (", "; seconds without a trainer (")
    rows = [("idle slots", f"{idle:.1f} s{share}{unused}")]
    if facts.get("yields") and "yield_s_p99" in facts:
        given_back = f"p50 {facts['yield_s_p50']:.3f}, p99 {facts['yield_s_p99']:.3f} s after the order"
        waited = f"the learner waited {facts['drafter_wait_s']:.1f} s ({facts['drafter_wait_share']:.1%} of the steps)"
        rows.append(("given back", f"{given_back}; {waited}"))
    if "drafter_versions_refused" in facts:
        merges = facts["drafter_merges"]
        refused = facts["drafter_versions_refused"]
        told = f"{facts['drafter_tokens_trained']} tokens, {facts['drafter_versions_published']} versions published, "
        told += f"{sum(refused.values())} refused{_largest(refused, 'd')}"
        told += f"; {merges['better']} of {merges['tried']} merges better" if merges["tried"] else ""
        told += f"; {facts['drafter_rollbacks']} rolled back" if facts["drafter_rollbacks"] else ""
        rows.append(("spot trainer", told))
    return rows


def _largest(amounts: Mapping[str, float], form: str) -> str:
    """The three largest with their reasons, in brackets; "" where there are none."""
    largest = sorted(amounts.items(), key=lambda item: -item[1])[:3]
    told = [f"{reason.replace('_', ' ')} {amount:{form}}" for reason, amount in largest]
    return f" ({', '.join(told)})" if told else ""


def next_commands(run_dir: Path) -> list[tuple[str, str]]:
    tlt, tensorboard = _command("tlt"), _command("tensorboard")
    return [
        ("check answers", f"{tlt} replay {run_dir} --sample 32 --drafter none"),
        ("curves", f"{tensorboard} --logdir {run_dir / 'tensorboard'}"),
        ("go on", f"{tlt} run --resume {run_dir} steps=N"),
    ]


def _command(name: str) -> str:
    """As it can be typed here: with its path where that isn't on PATH."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) or not beside.exists():
        return name
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def sparkline(values: list[float], width: int = 40) -> str:
    """A curve of at most `width` characters."""
    if len(values) < 2:
        return ""
    if len(values) > width:
        values = [values[round(index * (len(values) - 1) / (width - 1))] for index in range(width)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)
