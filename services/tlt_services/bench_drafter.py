"""`tlt bench drafter CONFIG`: the same RL run with a drafter that stays as it began and with one that idle slots train.

- `static`: `drafter.init` is published and used, and never trained;
- `adaptive`: as configured.

Consumes: a config. Publishes: two run directories, a table, a plot and (`--json`) a report. Each run is `tlt run` in
processes of its own, one after the other. Seed and answers are the same in both; each verify pass gets a chain of
`engine.speculation.depth` tokens from the drafter (`choice: fixed`, no n-grams, at any batch size), so that acceptance
length says something of the drafter alone: tokens a pass on the same text. A choice by goodput would draft the
better drafter deeper, and differently in each run. A replay afterwards would give each step one drafter version, where
the run itself counts every version for as long as it drafted.

Then, on the last answers, shared-noise proposals against greedy ones (bench_proposals.py), and from the beginning, with
neither run's drafters, an `eagle` drafter against an `eagle3` one (bench_kinds.py).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.rundir import RunDir, write_atomic
from tlt_services.bench import read_answers, run_variant
from tlt_services.bench_options import check_writable, open_figure, place_png

ROWS = 12
"""Of the table, at most: each the mean of some steps in a row."""
KINDS = ("eagle", "eagle3")
FIGURES = (
    *("acceptance_length_by_step", "acceptance_length_first", "acceptance_length_last", "drafter_version_by_step"),
    *("reward_by_step", "rollout_s", "step_s", "claim"),
    *("slot_idle_s", "slot_idle_used_s", "slot_idle_used_share"),
    *("drafter_tokens_trained", "drafter_versions_published", "drafter_versions_refused", "drafter_rollbacks"),
)
"""What the report has of each run's summary."""


def main(
    config_file: Path, overrides: list[str], json_path: Path | None, png: Path | None, kinds_seconds: float
) -> int:
    """0: compared, all answers identical where that is claimed; 1: some differed. `kinds_seconds`: of training each
    kind of drafter; 0: they aren't compared. Raises ConfigError, BenchFailed."""
    picture = place_png(png, json_path, "bench-drafter.png")
    check_writable(json_path, "--json")
    check_writable(picture, "--png")
    config = load_config(config_file, overrides)
    variants = variants_of(config)
    root = Path(tempfile.mkdtemp(prefix="tlt-bench-"))
    for name, settings in variants.items():
        run_variant(config_file, [*overrides, *settings], root / name, name)
    report = compare(root / "static", root / "adaptive")
    from tlt_services.bench_kinds import compare_kinds  # torch, after the runs: it takes memory from them
    from tlt_services.bench_proposals import compare_proposals

    report["proposals"] = compare_proposals(root / "adaptive")
    _save(report, json_path)
    if kinds_seconds:
        report["kinds"] = compare_kinds(config, kinds_seconds)
        _save(report, json_path)
    show(report, root)
    draw(report, picture)
    same = report["identical"] == report["answers"]
    return 0 if same or report["adaptive"]["claim"] != "exact" else 1


def _save(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write_atomic(path, json.dumps(report, indent=2) + "\n")


def variants_of(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """The settings that make the runs comparable, and those in which they differ. Raises ConfigError."""
    speculation = config.engine.speculation
    if speculation.drafter != "eagle":
        raise ConfigError(
            f"engine.speculation.drafter is {speculation.drafter}, and there is no trained drafter to compare: "
            f"set it to eagle"
        )
    forced = {"choice": "fixed", "ngram_depths": "[]", "max_batch": config.engine.max_batch}
    alike = [f"engine.speculation.{name}={value}" for name, value in forced.items()]
    return {
        "static": (*alike, "drafter.train.enabled=false"),
        "adaptive": (*alike, "drafter.train.enabled=true"),
    }


def compare(static: Path, adaptive: Path) -> dict[str, Any]:
    """Directories of the two runs -> the report."""
    runs = {"static": static, "adaptive": adaptive}
    summaries = {name: json.loads(RunDir(path).summary.read_text()) for name, path in runs.items()}
    answers = [{name: tokens for name, (tokens, _) in read_answers(path).items()} for path in runs.values()]
    names = answers[0].keys() | answers[1].keys()
    config = load_config(RunDir(adaptive).config)
    return {
        "steps": list(range(min(summary["steps"] for summary in summaries.values()))),
        **{name: {key: summary[key] for key in FIGURES} for name, summary in summaries.items()},
        "strategy": f"eagle-{config.engine.speculation.depth}",
        "gain_last": summaries["adaptive"]["acceptance_length_last"] / summaries["static"]["acceptance_length_last"],
        "answers": len(names),
        "identical": sum(answers[0].get(name) == answers[1].get(name) for name in names),
        "reward_curves_equal": summaries["static"]["reward_by_step"] == summaries["adaptive"]["reward_by_step"],
    }


# --- table and plot -------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], root: Path) -> None:
    console = Console()
    console.print(_table(report))
    static, adaptive, proposals = report["static"], report["adaptive"], report["proposals"]
    claim = adaptive["claim"]
    lines = (
        f"acceptance length of {report['strategy']} at the end (mean of the last steps): static "
        f"{static['acceptance_length_last']:.2f}, adaptive {adaptive['acceptance_length_last']:.2f}, "
        f"ratio {report['gain_last']:.2f}",
        f"idle slots: {adaptive['slot_idle_s']:.1f} s, {adaptive['slot_idle_used_s']:.1f} s of them used for "
        f"{adaptive['drafter_tokens_trained']} tokens; drafter versions, the first included: "
        f"{adaptive['drafter_versions_published']}; "
        f"static {static['slot_idle_s']:.1f} s, unused",
        f"{report['identical']} of {report['answers']} answers identical (claim: {claim}); "
        f"reward curves {'equal' if report['reward_curves_equal'] else 'differ'}; runs in {root}",
        f"proposals of drafter version {proposals['drafter_version']} on {proposals['answers']} answers of policy "
        f"version {proposals['policy_version']} ({proposals['identical']} as recorded both times):",
        *(f"  {name.replace('_', ' '):<14}{_positions(proposals[name])}" for name in ("shared_noise", "greedy")),
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if "kinds" in report:
        _show_kinds(report["kinds"], console)


def _show_kinds(kinds: dict[str, Any], console: Console) -> None:
    told = (
        f"kinds of drafters, each from the policy's last layer and trained on the same {kinds['answers']} answers; "
        f"acceptance length of {kinds['strategy']} on {kinds['held_out']} other prompts:"
    )
    console.print(told, highlight=False, soft_wrap=True)
    tokens = kinds["eagle"]["equal_tokens"]["tokens"] / 1e3
    seconds = max(kinds[name]["equal_seconds"]["seconds"] for name in KINDS)
    table = Table("")
    for column in ("trainable", "tokens/s", "start", f"{tokens:.0f} k tokens each", f"{seconds:.0f} s each"):
        table.add_column(column, justify="right")
    for name in KINDS:
        kind = kinds[name]
        start, alike, longer = (kind[point] for point in ("start", "equal_tokens", "equal_seconds"))
        table.add_row(
            *(name, f"{kind['parameters']:,}", f"{kind['tokens_per_s']:.0f}", f"{start['acceptance_length']:.2f}"),
            f"{alike['acceptance_length']:.2f} ({alike['seconds']:.0f} s)",
            f"{longer['acceptance_length']:.2f} ({longer['tokens'] / 1e3:.0f} k)",
        )
    console.print(table)


def _table(report: dict[str, Any]) -> Table:
    table = Table("steps")
    for column in ("static", "adaptive", "ratio", "drafter version", "reward"):
        table.add_column(column, justify="right")
    static, adaptive = (report[name]["acceptance_length_by_step"] for name in ("static", "adaptive"))
    for first, end in blocks(len(report["steps"])):
        before, after = _mean(static[first:end]), _mean(adaptive[first:end])
        steps = str(first) if end == first + 1 else f"{first}-{end - 1}"
        version = report["adaptive"]["drafter_version_by_step"][end - 1]
        reward = _mean(report["adaptive"]["reward_by_step"][first:end])
        table.add_row(steps, f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}", str(version), f"{reward:.3f}")
    return table


def blocks(steps: int) -> list[tuple[int, int]]:
    """Steps in a row, as few in each as make `ROWS` rows at most: (first, behind the last)."""
    width = max(-(-steps // ROWS), 1)
    return [(first, min(first + width, steps)) for first in range(0, steps, width)]


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def _positions(figures: dict[str, Any]) -> str:
    shares = " ".join(f"{share:.3f}" for share in figures["acceptance_by_position"])
    return f"acceptance length {figures['acceptance_length']:.2f}, by position {shares}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Acceptance by step, with the drafter's versions; by position, with and without shared noise, and of both kinds.
    Without matplotlib: says how to get it."""
    kinds = report.get("kinds")
    figure = open_figure(15 if kinds else 11, 4.5)
    if figure is None:
        return
    axes: Any = figure.subplots(1, 3 if kinds else 2, width_ratios=(2, 1, 1) if kinds else (2, 1))
    _draw_steps(axes[0], report)
    styles = {"shared_noise": "o-", "greedy": "s--"}
    lines = {name.replace("_", " "): (report["proposals"][name], style) for name, style in styles.items()}
    _draw_positions(axes[1], lines, "proposals of the same drafter")
    if kinds:
        points = {"tokens": "-", "seconds": ":"}
        lines = {
            f"{name}, same {point}": (kinds[name][f"equal_{point}"], colour_marker + line)
            for name, colour_marker in zip(KINDS, ("C0o", "C1s"), strict=True)
            for point, line in points.items()
        }
        _draw_positions(axes[2], lines, "kinds of drafters, trained alike")
    figure.savefig(path, format="png")
    typer.echo(f"drawn: {path}", err=True)


def _draw_positions(axes: Any, lines: dict[str, tuple[dict[str, Any], str]], title: str) -> None:
    """`lines`: by label, figures and style."""
    for label, (figures, style) in lines.items():
        shares = figures["acceptance_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, style, label=label)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share accepted, with all before it")
    axes.set_title(title)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_steps(axes: Any, report: dict[str, Any]) -> None:
    steps, adaptive = report["steps"], report["adaptive"]["acceptance_length_by_step"]
    axes.plot(steps, report["static"]["acceptance_length_by_step"][: len(steps)], "--", color="grey", label="static")
    axes.plot(steps, adaptive[: len(steps)], "-", color="tab:red", label="adaptive")
    versions = report["adaptive"]["drafter_version_by_step"]
    new = [step for step in steps if step and versions[step] != versions[step - 1]]
    axes.plot(new, [adaptive[step] for step in new], "o", color="tab:red", markersize=3, label="new drafter version")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("RL step")
    axes.set_ylabel(f"acceptance length ({report['strategy']})")
    axes.set_title(f"the same {report['answers']} answers, {report['identical']} identical")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
