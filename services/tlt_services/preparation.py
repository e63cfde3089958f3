"""Run directories before a run: made, described by a config, or taken up again."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from tlt_pipeline.config import ConfigError, RunConfig, dump_config, load_config
from tlt_pipeline.models.architecture import read_config
from tlt_pipeline.models.export_layout import check_folder, check_kind
from tlt_pipeline.models.locate import locate_drafter, locate_model
from tlt_pipeline.models.tensor_files import read_headers
from tlt_pipeline.rundir import RunDir, RunDirError, prepare_run_dir, slug, storing

_FIXED = ("seed", "policy", "task", "rollout", "engine.device", "engine.dtype", "engine.exact")
"""What a run is: changed, it would be another one, and its recorded answers no longer replayed."""


def is_prepared(root: Path) -> bool:
    """Whether services can start on it."""
    run = RunDir(root)
    return run.run_id_file.is_file() and run.config.is_file()


def is_finished(root: Path) -> bool:
    """Whether all steps that its config asks for are done."""
    run = RunDir(root)
    if not (is_prepared(root) and run.summary.is_file()):
        return False
    return int(json.loads(run.summary.read_text())["steps"]) >= load_config(run.config).steps


def check_models(config: RunConfig) -> None:
    """What the run begins with, by the headers of its files: a damaged one is better said now than by a process that
    started for it. Raises ModelError."""
    policy = locate_model(config.policy.model)
    dimensions = read_config(policy)
    read_headers(policy)
    if config.engine.speculation.drafter == "eagle":  # one that isn't trained drafts all the same
        folder = locate_drafter(config.drafter.init)
        if folder is not None:
            check_kind(check_folder(folder, dimensions).kind, config.drafter.kind, folder)


def make_run(config: RunConfig, root: Path, *, fresh: bool) -> RunDir:
    """The directory of a new run. `fresh`: it must be new or empty. Raises RunDirError, StorageError."""
    if fresh and root.is_dir() and any(root.iterdir()) and not is_prepared(root):
        raise RunDirError(f"{root} is not empty and holds no run: name another --run-dir")
    run = prepare_run_dir(root, config.name, fresh=fresh)
    save_config(config, run)
    return run


def resume_run(given: Path | None, overrides: list[str], root: Path) -> tuple[RunConfig, RunDir]:
    """A run to go on with: as `given` and `overrides` say now, as far as that is the same run.

    Raises ConfigError for settings that would make it another run, RunDirError where there is none."""
    run = RunDir(root.absolute())
    run.run_id()
    if not run.config.is_file():
        if given is None:
            raise RunDirError(
                f"{root} has no config.yaml: give the config too, tlt run CONFIG --run-dir {root} --resume"
            )
        return _saved(load_config(given, overrides), run)
    before = load_config(run.config)
    config = load_config(given or run.config, overrides)
    changed = [key for key in _FIXED if _at(before, key) != _at(config, key)]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} can't change within a run ({root}): resume with what it was, or start a new run"
        )
    return _saved(config, run)


def default_root(config: RunConfig) -> Path:
    """`run_dir` of the config, else runs/<name>-<date>-<time>."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path("runs") / f"{slug(config.name)}-{time.strftime('%Y%m%d-%H%M%S')}"


def save_config(config: RunConfig, run: RunDir) -> None:
    """The resolved config, whole or not at all."""
    temporary = run.config.with_name(f".config.{secrets.token_hex(4)}.yaml")
    with storing(run.config):
        dump_config(config, temporary)
        temporary.replace(run.config)


def note_redis(url: str, run: RunDir) -> None:
    """For `tlt status` and services started by hand; only this user's, because it may hold a password."""
    temporary = run.redis_url.with_name(f".redis_url.{secrets.token_hex(4)}")
    with storing(run.redis_url):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{url}\n")
        temporary.replace(run.redis_url)


def _saved(config: RunConfig, run: RunDir) -> tuple[RunConfig, RunDir]:
    save_config(config, run)
    return config, run


def _at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
