"""Progress of a run, as it goes: a live table on a terminal, else a log line a step. Draws; decides nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tlt_pipeline.scheduling.status import RunStatus

_BAR_WIDTH = 24
_log: Any = structlog.get_logger()


class Progress(Protocol):
    def __enter__(self) -> Progress: ...
    def __exit__(self, *exception: object) -> None: ...
    def update(self, status: RunStatus | None) -> None: ...


class MetricsTail:
    """What metrics.jsonl gained since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._size()

    def new_records(self) -> Iterator[dict[str, Any]]:
        """Whole lines that were appended; a file that shrank was written anew, and only what follows is new."""
        size = self._size()
        self._offset = min(self._offset, size)
        if size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read(size - self._offset)
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


class LiveTable:
    """Redrawn at each `update`, on stderr; above it scroll the log and a line a step."""

    def __init__(self, metrics: Path, console: Console) -> None:
        self._tail = MetricsTail(metrics)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._print_steps()
        self._live.stop()

    def update(self, status: RunStatus | None) -> None:
        self._print_steps()
        shown = Text("starting the processes…") if status is None else render_status(status)
        self._live.update(shown, refresh=True)

    def _print_steps(self) -> None:
        for record in self._tail.new_records():
            self._live.console.print(
                f"step {record['step'] + 1:>4}  reward {record['reward']:.3f}  "
                f"acceptance length {record['acceptance_length']:.2f}  drafter v{record['drafter_version']}  "
                f"{record['step_s']:.1f} s  {record['tokens_per_s']:.0f} tokens/s",
                highlight=False,
            )


class StepLines:
    """One line in the log for each step that metrics.jsonl tells of, and one whenever the run waits for another
    process."""

    def __init__(self, metrics: Path) -> None:
        self._tail = MetricsTail(metrics)
        self._waiting_for: str | None = None

    def __enter__(self) -> StepLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.update(None)

    def update(self, status: RunStatus | None) -> None:
        for record in self._tail.new_records():
            _log.info("step", **step_facts(record, status))
        if status is not None and status.waiting_for != self._waiting_for:
            self._waiting_for = status.waiting_for
            if status.waiting_for:
                _log.info("waiting", whom=status.waiting_for)


def step_facts(record: dict[str, Any], status: RunStatus | None) -> dict[str, Any]:
    """What one line says of a finished step."""
    facts: dict[str, Any] = {
        "step": record["step"] + 1,
        "reward": round(record["reward"], 4),
        "answers": record["requests_trained"],
        "policy_version": record["policy_version"],
        "drafter_version": record["drafter_version"],
        "acceptance_length": round(record["acceptance_length"], 2),
        "tokens_per_s": round(record["tokens_per_s"]),
        "rollout_s": round(record["rollout_s"], 2),
        "learner_s": round(record["learner_s"], 2),
        "step_s": round(record["step_s"], 2),
    }
    if record.get("eval_reward") is not None:
        facts["eval_reward"] = round(record["eval_reward"], 4)
    if record.get("dead_letters"):
        facts["dead_letters"] = record["dead_letters"]
    if status is not None:
        facts["steps"] = status.steps
        facts["slots"] = " ".join(f"{slot.slot}:{slot.holder or 'nobody'}" for slot in status.slots)
        if status.eta_s is not None:
            facts["left_s"] = round(status.eta_s)
    return facts


def render_status(status: RunStatus) -> RenderableType:
    """Three lines about the run, one a slot."""
    done = f"step {min(status.step + 1, status.steps)} of {status.steps}"
    head = Text.assemble((status.run, "bold"), f"  {done}  ", (status.phase, "cyan"), f"  {_left(status.eta_s)}")
    bar = Text(f"{_bar(status.answers_done, status.answers)} {status.answers_done}/{status.answers} answers")
    reward = "–" if status.reward is None else f"{status.reward:.3f}"
    so_far = "" if status.reward_so_far is None else f" (this step so far {status.reward_so_far:.3f})"
    facts = Text(
        f"mean reward {reward}{so_far}   acceptance length {status.acceptance_length:.2f}   "
        f"{status.tokens_per_s:.0f} tokens/s   policy v{status.policy_version}   drafter v{status.drafter_version}"
    )
    parts: list[RenderableType] = [head, facts] if status.phase == "finished" else [head, bar, facts]
    parts.append(_slot_table(status))
    if status.reason:
        parts.append(Text(status.reason, style="red"))
    elif status.waiting_for:
        parts.append(Text(f"waiting for {status.waiting_for}", style="yellow"))
    if status.dead_letters:
        parts.append(Text(f"{status.dead_letters} dead letters", style="red"))
    return Group(*parts)


def _slot_table(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("slot", "held by", "running", "tokens/s", "policy", "drafter", "processes"):
        table.add_column(name, justify="left" if name in ("held by", "processes") else "right")
    for slot in status.slots:
        lost = [name for name, state in (("rollout", slot.rollout), ("trainer", slot.trainer)) if state == "lost"]
        table.add_row(
            str(slot.slot),
            slot.holder or "nobody",
            str(slot.running),
            f"{slot.tokens_per_s:.0f}",
            _version(slot.policy_version),
            _version(slot.drafter_version),
            f"lost: {', '.join(lost)}" if lost else "",
        )
    return table


def _version(number: int) -> str:
    return "–" if number < 0 else f"v{number}"


def _bar(done: int, of: int) -> str:
    filled = round(_BAR_WIDTH * done / of) if of else 0
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} left" if hours else f"{minutes}:{rest:02d} left"
