"""The command line: `tlt`. Parses and hands over; torch is imported only by the commands that compute.

Exit codes: 0 done, 2 what the user gave, 1 what went wrong; then one line on stderr says what to do.
`--debug`, before or after the command, adds the traceback.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from tlt_pipeline.failures import EXIT_FAILED, EXIT_FATAL, EXIT_USER, explain
from tlt_pipeline.processes import bind_to_launcher
from tlt_services.cli_bench import bench_app
from tlt_services.cli_drafter import drafter_app, export_drafter, import_drafter
from tlt_services.cli_options import Overrides

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(no_args_is_help=True, help="Check configurations.")
models_app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")
app.add_typer(config_app, name="config")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.add_typer(drafter_app, name="drafter")

RunDir = Annotated[Path | None, typer.Option("--run-dir", envvar="TLT_RUN_DIR", help="The run's directory.")]
ServiceConfig = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="Needed where no run directory is prepared yet.")
]
Slot = Annotated[str, typer.Option("--slot", help="Number of the slot, or auto: the first free one.")]


@app.callback(invoke_without_command=True)
def _tlt(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """Reinforcement learning of reasoning LLMs without the long-tail wait."""
    del debug  # taken by `invoke`, wherever it stands
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"tlt-pipeline {installed('tlt-pipeline')}")
        raise typer.Exit()


@app.command(context_settings={"allow_interspersed_args": True})
def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file, or (--resume) a run directory.")
    ] = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last finished step.")] = False,
) -> int:
    """Train: start all processes of a run here, supervise them and show progress."""
    from tlt_services import launcher

    return launcher.launch(config, overrides or [], run_dir, resume=resume)


@app.command()
def sft(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Overrides = None,
) -> int:
    """Train a policy on written answers: a cold start, or pretraining from nothing."""
    from tlt_pipeline.config import ConfigError, load_config

    settings = load_config(config, overrides or [])
    if settings.sft is None:
        raise ConfigError(f"{config} has no sft section: add one (sft.out at least), or use `tlt run`")
    from tlt_pipeline.learner.sft import run_sft
    from tlt_pipeline.telemetry.logging import configure_logging

    configure_logging(settings.telemetry.log_level)
    run_sft(settings)
    return 0


@app.command()
def scheduler(config: ServiceConfig = None, overrides: Overrides = None, run_dir: RunDir = None) -> int:
    """The process that hands out requests, slots and steps. Prepares the run directory if nobody has."""
    from tlt_services.roles import serve

    return serve("scheduler", None, config, overrides or [], run_dir)


@app.command()
def learner(config: ServiceConfig = None, overrides: Overrides = None, run_dir: RunDir = None) -> int:
    """The process that updates the policy."""
    from tlt_services.roles import serve

    return serve("learner", None, config, overrides or [], run_dir)


@app.command()
def rollout(slot: Slot, config: ServiceConfig = None, overrides: Overrides = None, run_dir: RunDir = None) -> int:
    """The process that writes answers on one slot."""
    from tlt_services.roles import serve

    return serve("rollout", slot, config, overrides or [], run_dir)


@app.command("drafter-trainer")
def drafter_trainer(
    slot: Slot, config: ServiceConfig = None, overrides: Overrides = None, run_dir: RunDir = None
) -> int:
    """The process that trains the drafter while its slot is idle."""
    from tlt_services.roles import serve

    return serve("drafter-trainer", slot, config, overrides or [], run_dir)


@app.command()
def status(
    run_dir: Annotated[
        Path | None,
        typer.Argument(envvar="TLT_RUN_DIR", metavar="RUN_DIR", help="Default: the newest in runs/."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Show where a run stands."""
    from tlt_services import status as view

    return view.show(run_dir, as_json=json)


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    request: Annotated[str | None, typer.Option("--request", metavar="ID", help="This request.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every recorded request.")] = False,
    sample: Annotated[int | None, typer.Option("--sample", metavar="N", min=1, help="N of them.")] = None,
    drafter: Annotated[str, typer.Option("--drafter", help="none, latest, or a version.")] = "none",
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Write recorded answers again and compare the tokens."""
    from tlt_pipeline.config import ConfigError

    if sum((request is not None, all_, sample is not None)) > 1:
        raise ConfigError("--request, --all and --sample exclude each other: give one of them")
    if drafter not in ("none", "latest") and not drafter.isdigit():
        raise ConfigError(f"--drafter {drafter!r}: give none, latest, or the number of a version")
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run directory (no config.yaml in it): give one `tlt run` made")
    from tlt_services import replay as replaying

    return replaying.main(run_dir, request=request, all=all_, sample=sample, drafter=drafter, json=json)


@config_app.command("check")
def config_check(file: Annotated[Path, typer.Argument(metavar="FILE")], overrides: Overrides = None) -> int:
    """Say whether a configuration is valid."""
    from tlt_pipeline.config import load_config

    settings = load_config(file, overrides or [])
    about = f"{settings.steps} steps, {settings.slots.count} slots, policy {settings.policy.model}"
    typer.echo(f"{file}: valid ({about})")
    return 0


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(metavar="NAME")]) -> int:
    """Download and convert a model into the cache."""
    from tlt_pipeline.models.fetch import fetch_model

    typer.echo(str(fetch_model(name)))
    return 0


@models_app.command("list")
def models_list() -> int:
    """The models that `fetch` knows, and where fetched ones lie."""
    from tlt_pipeline.models.locate import FETCHABLE, fetched_folder

    for model in FETCHABLE.values():
        folder = fetched_folder(model.name)
        typer.echo(f"{model.name}: {folder if folder.is_dir() else 'not fetched'} ({model.about})")
    return 0


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> int:
    """Check this machine: what is installed, which Redis, which device, which dtype is fast."""
    from tlt_services import doctor as checks

    return checks.examine(as_json=json)


app.command("export-drafter")(export_drafter)
app.command("import-drafter")(import_drafter)


def invoke(arguments: list[str]) -> int:
    """One command; its exit code. Every failure is one line on stderr."""
    debug = "--debug" in arguments
    words = [part for part in arguments if part != "--debug"]
    try:
        code = app(args=words, prog_name="tlt", standalone_mode=False)
        return EXIT_FAILED if code == EXIT_FATAL else int(code or 0)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "tlt")
        message = error.format_message()
        is_help = message.startswith("Usage:")  # a group that was called without a command
        typer.echo(message if is_help else f"{command}: {message} (see {command} --help)", err=True)
        return EXIT_USER
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 shown as one line
        failure = explain(error, _place_of(words))
        if debug:
            traceback.print_exc()
        hint = "" if failure.expected or debug else "; --debug shows the traceback"
        typer.echo(f"tlt: {failure.line}{hint}", err=True)
        return EXIT_FAILED if failure.code == EXIT_FATAL else failure.code


def _place_of(words: list[str]) -> str | None:
    """What says where the command writes; None: nothing does."""
    set_otherwise = {"sft": "sft.out=DIR", "models": "TLT_CACHE"}
    command: Any = typer.main.get_command(app)
    for word in words:
        if word in set_otherwise:
            return set_otherwise[word]
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
    options = {name for parameter in command.params for name in parameter.opts}
    return next((name for name in ("--out", "--run-dir") if name in options), None)


def main() -> None:
    bind_to_launcher()
    code = invoke(sys.argv[1:])
    if "torch" in sys.modules:  # taking torch apart costs half a second of CPU; what must be tidied up is
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
