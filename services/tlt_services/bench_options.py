"""What `tlt bench engine` was asked for, checked before anything heavy is imported or measured. No torch here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import typer

from tlt_pipeline.config import ConfigError, EngineConfig
from tlt_pipeline.engine.strategies import OFF, Strategy, parse_strategy

MOST_ROWS = 1024


@dataclass(frozen=True)
class BenchOptions:
    """`strategies`: None takes a spread of what the config allows. `tokens`: a turn (one strategy, one round) decodes
    at least so many; None: what plain decoding makes in about half a second. `threads`: 0 is the config's, else 1."""

    model: str
    batches: tuple[int, ...]
    strategies: tuple[Strategy, ...] | None
    png: Path
    json: Path | None = None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    drafter: Path | None = None
    prompts: Path | None = None
    dtype: str | None = None
    tokens: int | None = None
    repeat: int = 7
    threads: int = 0
    seed: int = 0

    @property
    def run_dir(self) -> Path | None:
        """Where `model` is a run's directory."""
        path = Path(self.model)
        return path if (path / "config.yaml").is_file() else None

    def __post_init__(self) -> None:
        known = get_args(EngineConfig.model_fields["dtype"].annotation)
        if self.dtype is not None and self.dtype not in known:
            raise ConfigError(f"--dtype {self.dtype}: give one of {', '.join(known)}")
        if self.run_dir is not None and (self.config or self.prompts):
            raise ConfigError(
                f"{self.model} is a run directory, which brings its own config and prompts: leave out "
                f"{'--config' if self.config else '--prompts'}"
            )
        if self.overrides and self.run_dir is None and self.config is None:
            raise ConfigError(
                f"{self.overrides[0]} changes a config: give --config FILE, or a run directory as --model"
            )
        if self.prompts is not None and not self.prompts.is_file():
            raise ConfigError(f"no file {self.prompts}: --prompts takes a text file with one prompt a line")
        for file, option in ((self.json, "--json"), (self.png, "--png")):
            check_writable(file, option)


def check_writable(file: Path | None, option: str) -> None:
    """Before minutes are spent on numbers that could not be kept."""
    if file is None:
        return
    folder = file.parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {file} can't be written: give a file in a folder that exists and is yours")


def place_png(png: Path | None, json: Path | None, name: str = "bench-engine.png") -> Path:
    """Beside the JSON unless said otherwise; `name`: where there is none."""
    if png is not None:
        return png
    return Path(name) if json is None else json.with_suffix(".png")


def parse_batches(text: str) -> tuple[int, ...]:
    """Ascending, each once. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and 1 <= int(word) <= MOST_ROWS for word in words):
        raise ConfigError(f"--batch {text}: give numbers of answers from 1 to {MOST_ROWS}, such as 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


def parse_strategies(text: str | None) -> tuple[Strategy, ...] | None:
    """Raises ConfigError."""
    if text is None:
        return None
    try:
        chosen = tuple(dict.fromkeys(parse_strategy(word.strip()) for word in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"--strategies {text}: {error}") from error
    return (OFF, *(strategy for strategy in chosen if strategy != OFF))


def open_figure(width: float, height: float) -> Any:
    """A matplotlib figure of that many inches. Without matplotlib: None, and says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        typer.echo("no picture: matplotlib is missing; pip install 'tlt-pipeline[bench]' brings it", err=True)
        return None
    return Figure(figsize=(width, height), dpi=130, layout="constrained")
