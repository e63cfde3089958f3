"""`tlt bench e2e CONFIG`: the same run three times, and what speculation and spot training bring end to end.

- `off_plain`: no speculation, ordinary (batch-dependent) computation: the honest baseline of the ratios;
- `off`: no speculation, computing as configured;
- `on`: as configured. Its answers and rewards must equal those of `off`.

Consumes: a config. Publishes: three run directories, a table and (`--json`) a report. Each run is `tlt run` in
processes of its own, one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tlt_pipeline.bus.journal import read_journal
from tlt_pipeline.failures import Stopped
from tlt_pipeline.rundir import RunDir

NO_SPECULATION = ("engine.speculation.drafter=off", "drafter.train.enabled=false")
VARIANTS: dict[str, tuple[str, ...]] = {
    "off_plain": (*NO_SPECULATION, "engine.exact=off"),
    "off": NO_SPECULATION,
    "on": (),
}


class BenchFailed(RuntimeError):
    """One of the runs failed; the text says which and where its logs are."""


def e2e(config: Path, json_path: Path | None, *, overrides: list[str]) -> int:
    """0: compared, all answers identical; 1: some differed. Raises BenchFailed."""
    root = Path(tempfile.mkdtemp(prefix="tlt-bench-"))
    for name, settings in VARIANTS.items():
        run_variant(config, [*overrides, *settings], root / name, name)
    report = compare({name: root / name for name in VARIANTS})
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    _show(report, root)
    return 0 if report["identical"] == report["answers"] and report["reward_curves_equal"] else 1


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
    """Run directories of the three variants -> the report."""
    summaries = {name: json.loads(RunDir(path).summary.read_text()) for name, path in runs.items()}
    off, on = read_answers(runs["off"]), read_answers(runs["on"])
    shared = off.keys() | on.keys()
    plain, best = summaries["off_plain"], summaries["on"]
    return {
        **{name: _figures(summary) for name, summary in summaries.items()},
        "rollout_ratio": plain["rollout_s"] / best["rollout_s"],
        "step_ratio": plain["step_s"] / best["step_s"],
        "answers": len(shared),
        "identical": sum(off.get(name) == on.get(name) for name in shared),
        "reward_curves_equal": summaries["off"]["reward_by_step"] == best["reward_by_step"],
    }


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


def _show(report: dict[str, Any], root: Path) -> None:
    table = Table("", "rollout s", "learner s", "step s", "acceptance length", "last reward")
    for name in VARIANTS:
        row = report[name]
        figures = [f"{row[key]:.2f}" for key in ("rollout_s", "learner_s", "step_s", "acceptance_length")]
        table.add_row(name, *figures, f"{row['reward_by_step'][-1]:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"rollout ratio {report['rollout_ratio']:.2f}, step ratio {report['step_ratio']:.2f} (off_plain / on); "
        f"{report['identical']} of {report['answers']} answers identical between off and on; "
        f"reward curves {'equal' if report['reward_curves_equal'] else 'differ'}; runs in {root}"
    )
