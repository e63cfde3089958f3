"""`tlt bench e2e CONFIG`: the same run three times, and what speculation and spot training bring end to end.

- `off_plain`: no speculation, ordinary (batch-dependent) computation: the honest baseline of the ratios;
- `off`: no speculation, computing as configured;
- `on`: as configured. Its answers and rewards must equal those of `off`.

With `--parts` two more, between `off` and `on`, so that each row has one part more than the row above it:

- `ngram`: model-free proposals only, no trained drafter;
- `static`: the drafter of `drafter.init` too, which nobody trains; `on` is with training.

Consumes: a config. Publishes: the run directories, a table and (`--json`) a report. Each run is `tlt run` in
processes of its own, one after the other. Ratios are of sums over all steps, the first included, in which engine and
choice of strategies warm up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tlt_pipeline.bus.journal import read_journal
from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.failures import Stopped
from tlt_pipeline.rundir import RunDir
from tlt_services.bench_options import check_writable

NOT_TRAINED = "drafter.train.enabled=false"
NO_SPECULATION = ("engine.speculation.drafter=off", NOT_TRAINED)
BASELINE = "off_plain"
"""Not among the runs whose answers must be equal: they depend on the batch there."""
VARIANTS: dict[str, tuple[str, ...]] = {
    BASELINE: (*NO_SPECULATION, "engine.exact=off"),
    "off": NO_SPECULATION,
    "on": (),
}
PARTS: dict[str, tuple[str, ...]] = {
    BASELINE: VARIANTS[BASELINE],
    "off": VARIANTS["off"],
    "ngram": ("engine.speculation.drafter=ngram", NOT_TRAINED),
    "static": (NOT_TRAINED,),
    "on": VARIANTS["on"],
}


class BenchFailed(RuntimeError):
    """One of the runs failed; the text says which and where its logs are."""


def e2e(config: Path, json_path: Path | None, *, parts: bool, overrides: list[str]) -> int:
    """0: compared, all answers identical; 1: some differed. Raises ConfigError, BenchFailed."""
    check_writable(json_path, "--json")
    settled = load_config(config, overrides)
    if parts:
        check_parts(settled)
    variants = PARTS if parts else VARIANTS
    for settings in variants.values():
        load_config(config, [*overrides, *settings])  # all of them before the first one runs
    root = Path(tempfile.mkdtemp(prefix="tlt-bench-"))
    for name, settings in variants.items():
        run_variant(config, [*overrides, *settings], root / name, name)
    report = compare({name: root / name for name in variants})
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    show(report, root)
    return 0 if report["identical"] == report["answers"] and report["reward_curves_equal"] else 1


def check_parts(config: RunConfig) -> None:
    """Raises ConfigError where a part is missing."""
    if not config.trains_drafter:
        raise ConfigError(
            "--parts sets a trained drafter against one that isn't: set engine.speculation.drafter to eagle and "
            "drafter.train.enabled to true, or leave --parts out"
        )
    if config.engine.type == "native" and not config.engine.speculation.ngram_depths:
        raise ConfigError(
            "--parts has a row for n-gram proposals, and engine.speculation.ngram_depths is empty: fill it, or leave "
            "--parts out"
        )


def run_variant(config: Path, overrides: list[str], run_dir: Path, name: str) -> None:
    """`tlt run` in processes of its own, to the end. Raises BenchFailed."""
    typer.echo(f"--- {name}: tlt run {config} {' '.join(overrides)}", err=True)
    command = [sys.executable, "-m", "tlt_services.cli", "run", str(config), *overrides, "--run-dir", str(run_dir)]
    environment = {key: value for key, value in os.environ.items() if key != "TLT_RUN_DIR"}
    try:
        code = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=False).returncode
    except KeyboardInterrupt as stop:
        raise Stopped("interrupted") from stop
    if code:
        raise BenchFailed(f"the run {name!r} failed (exit code {code}): see {run_dir}/logs")


def compare(runs: dict[str, Path]) -> dict[str, Any]:
    """Run directories by name, of `VARIANTS` or `PARTS` -> the report. What is identical or equal is so in all runs but
    the baseline."""
    summaries = {name: json.loads(RunDir(path).summary.read_text()) for name, path in runs.items()}
    answers = {name: read_answers(path) for name, path in runs.items()}
    baseline = answers.pop(BASELINE)
    names = {request for found in answers.values() for request in found}
    plain, best = summaries[BASELINE], summaries["on"]
    report = {
        **{name: _figures(summary) for name, summary in summaries.items()},
        "rollout_ratio": plain["rollout_s"] / best["rollout_s"],
        "step_ratio": plain["step_s"] / best["step_s"],
        "answers": len(names),
        "identical": sum(len({found.get(request) for found in answers.values()}) == 1 for request in names),
        "reward_curves_equal": all(summaries[name]["reward_by_step"] == best["reward_by_step"] for name in answers),
    }
    if runs.keys() == PARTS.keys():
        for name, summary in summaries.items():
            report[name] |= _ratios(plain, summary)
        report["identical_in_off_plain"] = sum(
            baseline.get(request) == answers["off"].get(request) for request in names
        )
    return report


def _ratios(plain: dict[str, Any], summary: dict[str, Any]) -> dict[str, float]:
    """Against the baseline. `…_after_first`: without the step in which things warm up. `learner_ratio`: the median over
    the steps; a step's learner does the same work in every run, so it says how far the machine was the same."""
    found: dict[str, float] = {}
    for part in ("rollout", "step"):
        before, after = plain[f"{part}_s_by_step"], summary[f"{part}_s_by_step"]
        found[f"{part}_ratio"] = sum(before) / sum(after)
        if len(after) > 1:
            found[f"{part}_ratio_after_first"] = sum(before[1:]) / sum(after[1:])
    pairs = zip(plain["learner_s_by_step"], summary["learner_s_by_step"], strict=True)
    found["learner_ratio"] = median(before / after for before, after in pairs)
    return found


def read_answers(run_dir: Path) -> dict[str, tuple[bytes, float]]:
    """Tokens and reward, by request."""
    completions = read_journal(RunDir(run_dir).journal, "completions")
    return {entry.request_id: (entry.tokens.data, entry.reward) for entry in completions}


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "rollout_s": summary["rollout_s"],
        "learner_s": summary["learner_s"],
        "step_s": summary["step_s"],
        "acceptance_length": sum(summary["acceptance_length_by_step"]) / max(summary["steps"], 1),
        "reward_by_step": summary["reward_by_step"],
    }


def show(report: dict[str, Any], root: Path) -> None:
    parts = "ngram" in report
    console = Console()
    console.print(_parts_table(report) if parts else _table(report))
    compared = "all rows but off_plain" if parts else "off and on"
    console.print(
        f"rollout ratio {report['rollout_ratio']:.2f}, step ratio {report['step_ratio']:.2f} (off_plain / on); "
        f"{report['identical']} of {report['answers']} answers identical between {compared}; "
        f"reward curves {'equal' if report['reward_curves_equal'] else 'differ'}; runs in {root}"
    )
    if parts:
        learner = ", ".join(f"{name} {report[name]['learner_ratio']:.2f}" for name in PARTS if name != BASELINE)
        console.print(
            f"ratios: off_plain / row, over all steps (in brackets without step 0); {report['identical_in_off_plain']} "
            f"answers of off_plain as in off; learner s a step, the same work in each row, median of off_plain / row: "
            f"{learner}"
        )


def _table(report: dict[str, Any]) -> Table:
    table = Table("", "rollout s", "learner s", "step s", "acceptance length", "last reward")
    for name in VARIANTS:
        row = report[name]
        figures = [f"{row[key]:.2f}" for key in ("rollout_s", "learner_s", "step_s", "acceptance_length")]
        table.add_row(name, *figures, f"{row['reward_by_step'][-1]:.3f}")
    return table


def _parts_table(report: dict[str, Any]) -> Table:
    """80 columns wide."""
    table = Table("", "rollout\ns", "learner\ns", "step\ns", "accept.\nlength", "rollout\nratio", "step\nratio")
    for name in PARTS:
        row = report[name]
        seconds = [f"{row[key]:.1f}" for key in ("rollout_s", "learner_s", "step_s")]
        ratios = [_ratio(row, part) for part in ("rollout", "step")]
        table.add_row(name, *seconds, f"{row['acceptance_length']:.2f}", *ratios)
    return table


def _ratio(row: dict[str, Any], part: str) -> str:
    later = row.get(f"{part}_ratio_after_first")
    return f"{row[f'{part}_ratio']:.2f}" + ("" if later is None else f" ({later:.2f})")
