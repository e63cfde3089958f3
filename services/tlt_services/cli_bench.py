"""`tlt bench`: see cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlt_services.cli_options import JsonFile, Overrides

bench_app = typer.Typer(no_args_is_help=True, help="Measure the whole loop, the engine or the spot trainer.")


@bench_app.command("e2e")
def bench_e2e(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Overrides = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="Two runs more: n-gram proposals alone; a drafter that is never trained.")
    ] = False,
    json: JsonFile = None,
) -> int:
    """Run the same config without and with speculation, and compare times and answers."""
    from tlt_services import bench

    return bench.e2e(config, json, parts=parts, overrides=overrides or [])


@bench_app.command("engine")
def bench_engine(
    model: Annotated[str, typer.Option("--model", metavar="M", help="A run directory, or a model as in policy.model.")],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Tasks and engine settings, for a model alone.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option("--drafter", metavar="DIR", help="A drafter's folder; default: the run's newest.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="N,N", help="Batch sizes.")] = "1,2,4,8,16,32",
    strategies: Annotated[
        str | None, typer.Option("--strategies", metavar="S,S", help="Such as off,ngram-4,eagle-6,eagle-4x3x8.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="D", help="Default: the config's.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="One a line, for a model alone.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=1, help="Of a turn; default: about half a second's.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Rounds; the median counts.")] = 7,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: the config's, else 1.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=(1 << 31) - 1)] = 0,
    json: JsonFile = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Default: beside the JSON, or bench-engine.png.")
    ] = None,
) -> int:
    """Decode with each strategy and with what chooses among them, at every batch size; then a recorded tail."""
    from tlt_services.bench_options import BenchOptions, parse_batches, parse_strategies, place_png

    options = BenchOptions(
        model=model,
        batches=parse_batches(batch),
        strategies=parse_strategies(strategies),
        png=place_png(png, json),
        json=json,
        config=config,
        overrides=tuple(overrides or ()),
        drafter=drafter,
        prompts=prompts,
        dtype=dtype,
        tokens=tokens,
        repeat=repeat,
        threads=threads,
        seed=seed,
    )
    from tlt_services import bench_engine as bench

    return bench.main(options)


@bench_app.command("drafter")
def bench_drafter(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Overrides = None,
    json: JsonFile = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Default: beside the JSON, or bench-drafter.png.")
    ] = None,
    kinds_seconds: Annotated[
        float,
        typer.Option(
            "--kinds-seconds", metavar="N", min=0.0, help="Training of each kind of drafter; 0: leave it out."
        ),
    ] = 60.0,
) -> int:
    """Run the same config with a static and with the adaptive drafter, and compare acceptance step by step; then
    eagle against eagle3."""
    from tlt_services import bench_drafter as bench

    return bench.main(config, overrides or [], json, png, kinds_seconds)


@bench_app.command("spot")
def bench_spot(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Overrides = None,
    json: JsonFile = None,
) -> int:
    """Measure the spot trainer: packing, checkpoint stall, memory of the loss, and what streaming costs the rollout."""
    from tlt_pipeline.config import load_config

    load_config(config, overrides or [])
    from tlt_services import bench_spot as bench

    return bench.main(config, overrides or [], json)
