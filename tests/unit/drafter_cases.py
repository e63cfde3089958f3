"""Documents that a tiny policy really wrote, and trainers for its drafter."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.unit import engine_cases
from tlt_pipeline.config import RunConfig, validate_config
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.streaming import document_of
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import DrafterKind

DEPTH = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small lose by more. Import it to have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def policy(seed: int = 0) -> Decoder:
    """Surer of its next token than random weights are."""
    made = engine_cases.policy(seed=seed)
    with torch.no_grad():
        made.norm.weight.mul_(4.0)
    return made


@functools.cache
def written(count: int = 48, kind: DrafterKind = "eagle") -> tuple[Document, ...]:
    """What the engine streams while the policy writes `count` answers, in pieces of at most 16 tokens or so."""
    engine = engine_cases.engine(policy(), batch=16, speculate_up_to=1)
    engine.set_drafter(engine_cases.drafter(policy(), kind=kind), 1)  # for what it taps: nothing is to be drafted
    engine.set_drafter(None, 0)
    decode_all(engine, [engine_cases.request(number) for number in range(count)])
    return tuple(document_of(piece) for piece in engine.take_pieces())


@functools.cache
def whole_answers(count: int = 12) -> tuple[Document, ...]:
    """As `written`, but an answer is one document."""
    engine = engine_cases.engine(policy(), batch=16, speculate_up_to=1)
    engine.stream.chunk = 200
    decode_all(engine, [engine_cases.request(number) for number in range(count)])
    return tuple(document_of(piece) for piece in engine.take_pieces())


def document(length: int, *, position: int = 0, prompt: int = 0, size: int = 64, first_token: int = 0) -> Document:
    """Feature t is t everywhere, token t is `first_token` + t: what was paired with what can be read off."""
    steps = torch.arange(length)
    mask = (steps >= prompt).to(torch.uint8)
    hidden = steps.to(torch.float32)[:, None].expand(length, size).clone()
    return Document((first_token + steps).to(torch.int32), hidden, mask, position)


def config(**train) -> RunConfig:
    return validate_config(
        {
            "policy": {"model": "none"},
            "task": {"sources": [{"type": "reasoning_gym", "name": "chain_sum"}]},
            "rollout": {"max_new_tokens": 100},
            "engine": {"device": "cpu", "speculation": {"depth": DEPTH}},
            "drafter": {"train": {"tokens_per_batch": 256, "lr": 3e-3, **train}},
        }
    )


def trainer(*, version: int = 1, filled: bool = True, kind: DrafterKind = "eagle", **train) -> DrafterTrainer:
    """A trainer at the start, every eighth of the documents held out."""
    drafter = engine_cases.drafter(policy(), kind=kind)
    made = DrafterTrainer(config(**train), drafter, version, FrozenParts.of(policy(), 0), slot=0)
    if filled:
        made.buffer.add(written(kind=kind)[::8], 0, held_out=True)
        made.buffer.add([each for index, each in enumerate(written(kind=kind)) if index % 8], 0, held_out=False)
    return made


def train_steps(made: DrafterTrainer, steps: int) -> None:
    wanted = made.steps + steps
    while made.steps < wanted:
        made.train(60.0, lambda: made.steps >= wanted)
