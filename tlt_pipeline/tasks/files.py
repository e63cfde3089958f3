"""Prompts from the user's own files: JSONL, or Parquet with pyarrow installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, cast

from tlt_pipeline.config import FileSource
from tlt_pipeline.tasks.prompts import Message, Prompt, TaskError
from tlt_pipeline.tasks.verifiers import check_verifier

Row = dict[str, Any]

MAX_ROW = 256 * 1024
"""Characters of a row's JSON: it travels with each of its requests."""


class FilePrompts:
    """Rows of a file. The held-out rows are the same for every `seed`; the others are walked in an order
    that `seed` and the epoch decide. A row whose prompt is held out too is not trained on."""

    def __init__(self, label: str, source: FileSource, seed: int, held_out: int) -> None:
        check_verifier(label, source.verifier)
        self.label = label
        self._seed = seed
        rows = [_prompt(label, source, index, row) for index, row in enumerate(read_rows(source.path))]
        Random(0).shuffle(rows)
        self.held_out = rows[:held_out]
        apart = {_identity(prompt) for prompt in self.held_out}
        self._rows = [prompt for prompt in rows[held_out:] if _identity(prompt) not in apart]
        self._order: tuple[int, list[int]] = (-1, [])
        if not self._rows:
            raise TaskError(
                f"{source.path} has {len(rows)} rows and {held_out} of them are held out, which leaves none "
                f"to train on: lower task.held_out or add rows"
            )

    def at(self, position: int) -> Prompt:
        """The training prompt at a position, a pure function of it."""
        epoch, offset = divmod(position, len(self._rows))
        if self._order[0] != epoch:
            order = list(range(len(self._rows)))
            Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._rows[self._order[1][offset]]


def read_rows(path: str) -> list[Row]:
    """All rows of a JSONL (or, by its suffix, Parquet) file. Raises TaskError: missing, empty, or
    unreadable."""
    file = Path(path)
    if not file.is_file():
        raise TaskError(f"no data file {path}: give the path of a JSONL or Parquet file")
    try:
        rows = _read_parquet(file) if file.suffix == ".parquet" else list(_read_jsonl(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} can't be read as text: {error}; give a JSONL or Parquet file") from error
    if not rows:
        raise TaskError(f"{path} holds no rows: give a file with at least one example")
    return rows


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(f"{file}, line {number}, is not JSON ({error.msg}): fix or remove it") from error
            if not isinstance(row, dict):
                raise TaskError(f"{file}, line {number}, is no JSON object: write {{...}} on each line")
            yield cast(Row, row)


def _read_parquet(file: Path) -> list[Row]:
    try:
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise TaskError(f"{file} needs pyarrow: pip install 'tlt-pipeline[parquet]', or give JSONL") from error
    try:
        return parquet.read_table(file).to_pylist()
    except arrow.ArrowException as error:
        text = " ".join(str(error).split())
        raise TaskError(f"{file} is not readable as Parquet: {text}; write it again or give JSONL") from error


def _prompt(label: str, source: FileSource, index: int, row: Row) -> Prompt:
    where = f"{source.path}, row {index + 1}"
    content = row.get(source.prompt_key, row.get("messages"))
    if content is None:
        raise TaskError(_missing(where, "prompt_key", source.prompt_key, row))
    answer = row.get(source.answer_key)
    if answer is None:
        raise TaskError(_missing(where, "answer_key", source.answer_key, row))
    entry = json.dumps({**row, "answer": str(answer)}, default=str)
    if len(entry) > MAX_ROW:
        raise TaskError(f"{where}, takes {len(entry)} characters (limit {MAX_ROW}): drop columns")
    if isinstance(content, str):
        return Prompt(label, index, content, None, str(answer), entry)
    return Prompt(label, index, "", _messages(where, content), str(answer), entry)


def _messages(where: str, content: Any) -> tuple[Message, ...]:
    messages: list[Message] = []
    for message in cast(list[Any], content) if isinstance(content, list) else []:
        if not isinstance(message, dict) or not {"role", "content"} <= cast(Row, message).keys():
            break
        messages.append(cast(Row, message))
    else:
        if messages:
            return tuple(messages)
    raise TaskError(
        f'{where}: the prompt is neither text nor a list of {{"role": ..., "content": ...}}: rewrite the row'
    )


def _missing(where: str, setting: str, key: str, row: Row) -> str:
    columns = ", ".join(sorted(row)) or "none"
    return f"{where}, has no {key!r} (columns: {columns}): set {setting} of the task source"


def _identity(prompt: Prompt) -> str:
    return prompt.question if prompt.messages is None else json.dumps(prompt.messages, default=str)
