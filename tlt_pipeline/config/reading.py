"""Settings from YAML and overrides, and back; errors in one line that names the remedy."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from tlt_pipeline.config.base import ConfigError
from tlt_pipeline.config.run import RunConfig


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Reads YAML plus `key.sub=value` overrides. Relative paths stay relative to the working directory.

    Raises ConfigError with one line: file missing, not YAML, unknown key (nearest valid one named), wrong type."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no config file {file}: give the path of a YAML file, such as configs/quickstart.yaml")
    try:
        base = OmegaConf.load(file)
        for text in overrides:
            key, found, value = text.partition("=")
            if not found or not key:
                raise ConfigError(f"override {text!r} is not key.sub=value")
            OmegaConf.update(base, key, yaml.safe_load(value), force_add=True)
        content: Any = OmegaConf.to_container(base, resolve=True)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} or an override is not YAML: {_one_line(error)}") from error
    except (OmegaConfBaseException, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{file}: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no settings: expected a YAML mapping at the top")
    return validate_config(cast(dict[str, Any], content), str(file))


def validate_config(content: dict[str, Any], origin: str = "config") -> RunConfig:
    """A mapping to a RunConfig. Raises ConfigError with one line."""
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(error)}") from error


def dump_config(config: RunConfig, path: str | Path) -> None:
    """Writes the resolved config as YAML that `load_config` reads back to an equal one."""
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump(mode="json")))))


def _escape(content: Any) -> Any:
    """Text that would be an interpolation when it is read back stays what it is."""
    match content:
        case dict():
            return {key: _escape(value) for key, value in cast(dict[str, Any], content).items()}
        case list():
            return [_escape(value) for value in cast(list[Any], content)]
        case str() if "${" in content:
            return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", content)
        case _:
            return content


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _explain(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    # A mistyped key is missing under its right name too: that it is unknown says more.
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])
    path = [part for part in first["loc"] if part not in ("reasoning_gym", "file")]
    where = ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        valid = _valid_keys(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"
        return f"unknown key {where!r}; {hint}"
    if first["type"] == "missing":
        return f"{where!r} is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["input"] is None:
        message += ", and it is empty: give a value or leave the key out"
    return f"{where}: {message}" if where else message


def _valid_keys(path: list[int | str]) -> list[str]:
    """Keys that the section at `path` takes; of every member where it is a union or list."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in path:
        if isinstance(part, int):
            continue
        models = [
            inner
            for model in models
            if part in model.model_fields
            for inner in _sections(model.model_fields[part].annotation)
        ]
    return [key for model in models for key in model.model_fields]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [model for inner in get_args(annotation) for model in _sections(inner)]
