"""A drafter before RL: trained on answers that the policy writes to the task's prompts, until time is up or it no
longer pays. What comes out is a folder for `drafter.init`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from tlt_pipeline.config import ConfigError, RunConfig
from tlt_pipeline.drafter.evaluation import HeldOut
from tlt_pipeline.drafter.initial import fit_initial, load_initial
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.start import TEXTS
from tlt_pipeline.drafter.streaming import document_of
from tlt_pipeline.drafter.texts import TextWriter
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.folders import draft_folder, replace_folder
from tlt_pipeline.learner.compute import use_threads
from tlt_pipeline.models.checkpoint import is_drafter, load_decoder, save_drafter
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.locate import locate_drafter, locate_model
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.processes import slot_threads

HELD_OUT = 48
ANSWERS = 96
"""Written at a time; fewer where that would take too much of the time there is."""
FEWEST_ANSWERS = 8
WRITING_SHARE = 0.1
"""Of all the time, for what is written at a time: a few rounds are to fit in."""
TRAINING_SHARE = 3
"""Seconds of training for each second of writing: fresh answers teach more than known ones."""
MOST_EPOCHS = 8
"""Of a round's training, over all that is written by then: where writing is slow, more would be learned by heart. On
SmolLM2, two cores, acceptance length on other answers: 2.26 after 235 s (100 answers) without, 2.41 after 102 s."""
SHORTEST_S = 1.0
"""Of a round's training, also where writing took all the time there was."""
PATIENCE = 3
"""Ends after so many rounds without a gain worth publishing."""


@dataclass(frozen=True)
class WarmupReport:
    """`acceptance_length`: expected tokens a verify pass on held-out answers, at the start and at the end."""

    folder: str
    seconds: float
    answers: int
    tokens_trained: int
    acceptance_length_start: float
    acceptance_length: float
    agreement: tuple[float, ...]
    vocabulary: int
    vocabulary_covered: float


def run_warmup(config: RunConfig, out: Path, seconds: float, log: Any = None) -> WarmupReport:
    """Raises ConfigError, TaskError or ModelError for what the user gave, StorageError for a full disk."""
    if out.exists() and not is_drafter(out):
        raise ConfigError(f"{out} exists and is no drafter's folder: give another --out, or remove it")
    with draft_folder(out):  # a place that can't be written is better said now
        pass
    use_threads(slot_threads(config))
    device = choose_device(config.engine.device)
    folder = locate_model(config.policy.model)
    policy = load_decoder(folder, choose_dtype(config.engine.dtype, device), device)
    warmup = _Warmup(config, policy, folder, out, log or structlog.get_logger())
    report = warmup.train(seconds, str(out))
    with draft_folder(out) as draft:
        save_drafter(warmup.trainer.average, draft)
        (draft / "warmup.json").write_text(
            json.dumps({"policy": config.policy.model, **asdict(report)}, indent=2) + "\n"
        )
        replace_folder(draft, out)
    return report


class _Warmup:
    def __init__(self, config: RunConfig, policy: Decoder, folder: Path, out: Path, log: Any) -> None:
        """`drafter.init` may name what is to be made: then it begins from the policy."""
        self.config, self.policy, self.log = config, policy, log
        init = locate_drafter(config.drafter.init) if config.drafter.init != str(out) or is_drafter(out) else None
        begun = None if init is None else load_initial(config, init, policy.config)
        self.writer = TextWriter(config, policy, load_tokenizer(folder), config.rollout.max_new_tokens)
        began = time.monotonic()
        texts, pieces = self.writer.write(0, HELD_OUT)
        self.seconds_per_answer = (time.monotonic() - began) / HELD_OUT
        drafter = begun or fit_initial(config, policy, texts[:TEXTS])
        frozen = FrozenParts.of(policy, 0, policy.embed.weight.device)
        self.trainer = DrafterTrainer(config, drafter, 0, frozen, slot=0, trained=begun is not None)
        self.trainer.buffer.add([document_of(piece) for piece in pieces], 0, held_out=True)
        self.answers = self.tokens = 0

    def train(self, seconds: float, out: str) -> WarmupReport:
        began, round_number, idle_rounds = time.monotonic(), 0, 0
        first = best = self._judge()
        while not round_number or (time.monotonic() - began < seconds and idle_rounds < PATIENCE):
            round_number += 1
            wrote = self._write(round_number, seconds)
            left = max(seconds - (time.monotonic() - began), SHORTEST_S)
            self._learn(min(TRAINING_SHARE * wrote, left))
            found = self._judge()
            gained = found.loss < best.loss * (1.0 - self.config.drafter.train.min_gain)
            best, idle_rounds = (found, 0) if gained else (best, idle_rounds + 1)
            self.log.info(
                "warm-up",
                seconds=round(time.monotonic() - began),
                answers=self.answers,
                tokens_trained=self.trainer.tokens_trained,
                acceptance_length=round(found.acceptance_length, 3),
                vocabulary_covered=round(self.trainer.covered, 5),
            )
        return self._report(out, time.monotonic() - began, first, self._judge())

    def _write(self, number: int, seconds: float) -> float:
        """-> seconds it took, of `seconds` for everything."""
        fitting = int(WRITING_SHARE * seconds / self.seconds_per_answer)
        began = time.monotonic()
        texts, pieces = self.writer.write(number, max(FEWEST_ANSWERS, min(fitting, ANSWERS)))
        documents = [document_of(piece) for piece in pieces]
        self.trainer.buffer.add(documents, 0, held_out=False)
        self.answers += len(texts)
        self.tokens += sum(map(len, documents))
        return time.monotonic() - began

    def _learn(self, seconds: float) -> None:
        enough = self.trainer.tokens_trained + MOST_EPOCHS * self.tokens
        self.trainer.train(seconds, lambda: self.trainer.tokens_trained >= enough)

    def _judge(self) -> HeldOut:
        judgement = self.trainer.judge()
        if judgement is None:
            raise ConfigError("the policy's answers hold nothing to learn from: see task and rollout.max_new_tokens")
        return judgement.candidate

    def _report(self, out: str, seconds: float, first: HeldOut, last: HeldOut) -> WarmupReport:
        ids = self.trainer.average.draft_ids
        return WarmupReport(
            folder=out,
            seconds=round(seconds, 1),
            answers=self.answers,
            tokens_trained=self.trainer.tokens_trained,
            acceptance_length_start=round(first.acceptance_length, 3),
            acceptance_length=round(last.acceptance_length, 3),
            agreement=tuple(round(share, 3) for share in last.agreement),
            vocabulary=self.policy.config.vocab_size if ids is None else len(ids),
            vocabulary_covered=round(self.trainer.covered, 5),
        )
