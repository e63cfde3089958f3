"""The results of `tlt bench engine` as a table, as JSON and as a PNG. No torch here, and no numbers of its own."""

from __future__ import annotations

import json as jsonlib
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tlt_pipeline.rundir import write_atomic
from tlt_services.bench_options import open_figure

QUIET = 0.9
"""With a smaller share of a core the times say more of the machine's other work than of the engine."""
OFF_NAMES = ("off_plain", "off")
ADAPTIVE = "adaptive:"


@dataclass(frozen=True)
class Row:
    """`tokens_per_s`: of the whole batch; `acceptance_length`: tokens a row and pass, the bonus token included;
    `ratio_to_off`: tokens/s against `off_plain` of the same batch size."""

    batch: int
    strategy: str
    tokens_per_s: float
    acceptance_length: float
    step_ms: float
    ratio_to_off: float


@dataclass(frozen=True)
class TailReplay:
    """`batch`: answers running when the shrinking began. `seconds` by strategy. Of `answers`, `identical` were written
    alike by `off` as configured and all adaptive policies, `as_recorded` as in the run, `as_plain` as by off_plain."""

    off_s: float
    adaptive_s: float
    adaptive: str
    seconds: dict[str, float]
    batch: int
    answers: int
    longest: int
    identical: int
    as_recorded: int | None
    as_plain: int
    policy_version: int
    drafter_version: int

    @property
    def ratio(self) -> float:
        return self.off_s / max(self.adaptive_s, 1e-9)


@dataclass
class Report:
    model: str
    dtype: str
    claim: str
    threads: int
    policy_version: int
    drafter_version: int
    rows: list[Row] = field(default_factory=list[Row])
    unavailable: list[str] = field(default_factory=list[str])
    """Strategies that the engine doesn't run here, once for each batch size."""
    compared: int = 0
    """Answers that several rows began (off_plain left out), and those that were the same in all of them."""
    identical: int = 0
    cpu_share: float = 1.0
    """Seconds of processor time that a second brought, at the batch size with the least: below 1 with one thread, other
    processes took the rest."""
    tail: TailReplay | None = None

    @property
    def batches(self) -> list[int]:
        return sorted({row.batch for row in self.rows})

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(row.strategy for row in self.rows))

    def at(self, batch: int) -> dict[str, Row]:
        return {row.strategy: row for row in self.rows if row.batch == batch}

    def adaptive(self) -> list[dict[str, Any]]:
        """What adapting brought at each batch size, against the fixed strategy that was best there and against off."""
        return [
            {
                "batch": batch,
                "strategy": name,
                "best_fixed": best.strategy,
                "to_best_fixed": row.tokens_per_s / best.tokens_per_s,
                "to_off": row.ratio_to_off,
            }
            for batch in self.batches
            for best in [self._best_fixed(batch)]
            for name, row in self.at(batch).items()
            if name.startswith(ADAPTIVE)
        ]

    def _best_fixed(self, batch: int) -> Row:
        """`off_plain` is no strategy that could be chosen where answers must be exact."""
        fixed = [row for name, row in self.at(batch).items() if not name.startswith(ADAPTIVE) and name != "off_plain"]
        return max(fixed, key=lambda row: row.tokens_per_s)


def write_json(report: Report, path: Path) -> None:
    assert report.tail is not None
    tail = {**asdict(report.tail), "ratio": report.tail.ratio}
    content = {
        "model": report.model,
        "dtype": report.dtype,
        "rows": [asdict(row) for row in report.rows],
        "adaptive": report.adaptive(),
        "tail_replay": tail,
        "claim": report.claim,
        "compared": report.compared,
        "identical": report.identical,
        "unavailable": sorted(set(report.unavailable)),
        "policy_version": report.policy_version,
        "drafter_version": report.drafter_version,
        "threads": report.threads,
        "cpu_share": report.cpu_share,
        "machine": {"processor": _processor(), "system": platform.platform(), "torch": installed("torch")},
    }
    write_atomic(path, jsonlib.dumps(content, indent=2) + "\n")


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_report(report: Report) -> None:
    console = Console()
    table = Table("batch", title=f"{report.model}, {report.dtype}, claim: {report.claim}")
    table.add_column("strategy", no_wrap=True)
    for name in ("tokens/s", "acceptance length", "step ms", "ratio to off"):
        table.add_column(name, justify="right")
    for batch in report.batches:
        rows = report.at(batch)
        best = max(rows.values(), key=lambda row: row.tokens_per_s)
        for name, row in rows.items():
            cells = (f"{row.tokens_per_s:.1f}", f"{row.acceptance_length:.2f}", f"{row.step_ms:.2f}")
            table.add_row(str(batch), name, *cells, f"{row.ratio_to_off:.2f}", style="bold" if row is best else None)
        table.add_section()
    console.print(table)
    _print_adaptive(report, console)
    console.print(
        f"{report.identical} of {report.compared} answers identical in all rows (off_plain left out)",
        highlight=False,
        soft_wrap=True,
    )
    if report.unavailable:
        names = ", ".join(dict.fromkeys(report.unavailable))
        console.print(f"not available here: {names}", highlight=False, soft_wrap=True)
    if report.tail is not None:
        _print_tail(report.tail, console)
    if report.cpu_share < QUIET:
        typer.echo(
            f"this process had only {report.cpu_share:.0%} of a core: other work makes these numbers noisy: "
            f"measure on a quiet machine, or raise --repeat",
            err=True,
        )


def _print_adaptive(report: Report, console: Console) -> None:
    for entry in report.adaptive():
        console.print(
            f"batch {entry['batch']}: {entry['strategy']} has {entry['to_best_fixed']:.2f} of the best fixed strategy "
            f"({entry['best_fixed']}), {entry['to_off']:.2f} of off_plain",
            highlight=False,
            soft_wrap=True,
        )


def _print_tail(tail: TailReplay, console: Console) -> None:
    console.print(
        f"tail replay: {tail.answers} answers of up to {tail.longest} tokens, from {tail.batch} running to none: off "
        f"{tail.off_s:.2f} s, {tail.adaptive} {tail.adaptive_s:.2f} s, ratio {tail.ratio:.2f}",
        highlight=False,
        soft_wrap=True,
    )
    for name, seconds in tail.seconds.items():
        console.print(
            f"  {name:<18}{seconds:8.2f} s {tail.off_s / max(seconds, 1e-9):6.2f}", highlight=False, soft_wrap=True
        )
    recorded = "" if tail.as_recorded is None else f"; {tail.as_recorded} as recorded"
    console.print(
        f"{tail.identical} of {tail.answers} answers identical between off and all adaptive runs{recorded}; "
        f"{tail.as_plain} as off_plain wrote them",
        highlight=False,
        soft_wrap=True,
    )


def draw_png(report: Report, path: Path) -> None:
    """One line a strategy: batch size against the ratio to off. Without matplotlib: says how to get it."""
    figure = open_figure(9, 5.5)
    if figure is None:
        return
    axes: Any = figure.add_subplot()
    places = {batch: place for place, batch in enumerate(report.batches)}
    for name in report.strategies:
        rows = [row for row in report.rows if row.strategy == name]
        xs, ys = [places[row.batch] for row in rows], [row.ratio_to_off for row in rows]
        axes.plot(xs, ys, label=name, **_style(name))
    axes.set_xticks(list(places.values()), [str(batch) for batch in places])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("answers decoded at once")
    axes.set_ylabel("tokens/s, ratio to off (ordinary computation)")
    axes.set_title(f"{report.model}, {report.dtype}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, format="png")
    typer.echo(f"drawn: {path}", err=True)


def _style(name: str) -> dict[str, Any]:
    if name.startswith(ADAPTIVE):
        colour = "black" if name.endswith("goodput") else "tab:red"
        return {"linewidth": 3.2, "marker": "o", "color": colour, "zorder": 3}
    if name in OFF_NAMES:
        return {"linewidth": 1.6, "linestyle": "--", "marker": ".", "color": "grey" if name == "off" else "darkgrey"}
    kind = {"ngram": ":", "eagle": "-"}[name.partition("-")[0]]
    return {"linewidth": 1.4, "linestyle": "-." if "x" in name else kind, "marker": "."}
