"""What supervised training reads: pairs of prompt and response, from a file or from the tasks' own traces."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tlt_pipeline.config import ConfigError, FileSource, RunConfig, SFTSource, TaskConfig
from tlt_pipeline.learner.batching import Example
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.tasks.mix import TaskMix, labelled_sources
from tlt_pipeline.tasks.prompts import Prompt, prompt_text, render
from tlt_pipeline.tasks.traces import write_trace

DATA_SEED_OFFSET = 1_000_003
"""Traces come from another seed than the prompts of reinforcement learning: those should be new to the
policy."""


@dataclass(frozen=True)
class Pair:
    prompt: Prompt
    response: str


def read_pairs(config: RunConfig, data: SFTSource) -> list[Pair]:
    """Up to `data.examples` pairs, the same for the same seed. Raises ConfigError for a file without usable
    rows."""
    return read_file(Path(data.path), data.examples) if data.path else write_pairs(config, data)


def write_pairs(config: RunConfig, data: SFTSource) -> list[Pair]:
    """Traces of `task.sources`, mixed by weight. Raises TaskError for a task that has no traces."""
    sources = labelled_sources(config.task)
    slips = Random(config.seed)
    pairs: list[Pair] = []
    for prompt in TaskMix(config.task, config.seed + DATA_SEED_OFFSET).draw(0, data.examples):
        source = sources[prompt.source]
        if isinstance(source, FileSource):
            raise ConfigError(
                f"task source {prompt.source!r} is a file, which has no traces: give sft.data.path with "
                f'lines of {{"prompt": …, "response": …}}'
            )
        pairs.append(Pair(prompt, write_trace(source, prompt.entry, data.slips, slips)))
    return pairs


def read_file(path: Path, limit: int) -> list[Pair]:
    """JSONL, each line {"prompt": text or chat messages, "response": text}. Raises ConfigError naming the
    line."""
    if not path.is_file():
        raise ConfigError(f"sft.data.path {path} is no file: give JSONL with prompt and response, or leave it out")
    pairs: list[Pair] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                pairs.append(_parse_line(line, f"{path}:{number}"))
            if len(pairs) == limit:
                break
    if not pairs:
        raise ConfigError(f"sft.data.path {path} is empty: it needs lines of prompt and response")
    return pairs


def find_alphabet(pairs: Sequence[Pair], task: TaskConfig) -> str:
    """Characters of a new model: printable ASCII, newline, and what else prompts and responses hold."""
    found = set(string.ascii_letters + string.digits + string.punctuation + " \n")
    for pair in pairs:
        found.update(pair.response)
        found.update(prompt_text(pair.prompt, task))
        for message in pair.prompt.messages or ():
            found.update(str(message.get("content", "")))
    return "".join(sorted(found))


def encode_pairs(pairs: Sequence[Pair], task: TaskConfig, tokenizer: Tokenizer) -> list[Example]:
    """Prompt as the rollout renders it, then the response and the token that ends an answer."""
    if not tokenizer.eos_ids:
        raise ConfigError(
            "the policy's tokenizer names no end token, so answers would never end: set eos_token in its "
            "tokenizer_config.json"
        )
    return [_encode(pair, task, tokenizer) for pair in pairs]


def draw_batches(examples: Sequence[Example], tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of example indices with about `tokens` tokens each (at least one example), each epoch
    in an order of its own, the same for the same seed."""
    rng = Random(seed)
    batch: list[int] = []
    used = 0
    while True:
        order = list(range(len(examples)))
        rng.shuffle(order)
        for index in order:
            length = len(examples[index].tokens)
            if batch and used + length > tokens:
                yield batch
                batch, used = [], 0
            batch.append(index)
            used += length


def _encode(pair: Pair, task: TaskConfig, tokenizer: Tokenizer) -> Example:
    prompt = render(pair.prompt, task, tokenizer)
    return Example((*prompt, *tokenizer.encode(pair.response), tokenizer.eos_ids[0]), len(prompt))


def _parse_line(line: str, where: str) -> Pair:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error.msg}): each line is one object") from error
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        raise ConfigError(f"{where} has no text under 'response': each line holds a prompt and a response")
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return Pair(Prompt("sft", 0, prompt, None, "", "{}"), row["response"])
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return Pair(Prompt("sft", 0, "", tuple(prompt), "", "{}"), row["response"])
    raise ConfigError(f"{where} has no 'prompt' that is text or a list of chat messages: add one")
