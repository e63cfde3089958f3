"""`tlt drafter`, `tlt export-drafter` and `tlt import-drafter`: see cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlt_services.cli_options import Overrides

drafter_app = typer.Typer(no_args_is_help=True, help="Train a drafter before RL.")


@drafter_app.command("warmup")
def drafter_warmup(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Default: runs/models/NAME-drafter.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="At most; it ends when it gains no more.")] = 300,
) -> int:
    """Train a drafter on the policy's own answers to the task's prompts, for drafter.init."""
    from tlt_pipeline.config import load_config
    from tlt_pipeline.drafter.warmup import run_warmup
    from tlt_pipeline.telemetry.logging import configure_logging

    settings = load_config(config, overrides or [])
    configure_logging(settings.telemetry.log_level)
    folder = out or Path("runs/models") / f"{settings.name}-drafter"
    report = run_warmup(settings, folder, seconds)
    typer.echo(
        f"acceptance length {report.acceptance_length_start} -> {report.acceptance_length} in {report.seconds} s, "
        f"{report.tokens_trained} tokens; use it: tlt run {config} drafter.init={folder}"
    )
    return 0


def export_drafter(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run, or a drafter's folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Written whole or not at all.")],
    format: Annotated[str, typer.Option("--format", metavar="F", help="vllm, sglang or speculators.")] = "vllm",
    version: Annotated[int | None, typer.Option("--version", metavar="N", help="Default: the newest.")] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="M", help="For a drafter alone: whose it is, as in policy.model.")
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure acceptance on held-out prompts for the model card.")] = True,
) -> int:
    """Write a drafter for a serving engine."""
    from typing import get_args

    from tlt_pipeline.config import ConfigError

    if not (source / "config.yaml").is_file() and not (source / "config.json").is_file():
        raise ConfigError(f"{source} is neither a run directory nor a drafter's folder: give one of them")
    from tlt_pipeline.models.export import Format

    if format not in get_args(Format):
        raise ConfigError(f"--format {format!r}: give one of {', '.join(get_args(Format))}")
    from tlt_services import export

    return export.write(source, format, out, version=version, policy=policy, measure=measure)  # type: ignore[arg-type]


def import_drafter(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="What export-drafter wrote.")],
    policy: Annotated[str, typer.Option("--policy", metavar="M", help="Whose drafter it is, as in policy.model.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR")],
) -> int:
    """Read an exported drafter back, as a folder for drafter.init."""
    from tlt_services import export

    return export.read(source, policy, out)
