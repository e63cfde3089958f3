"""EAGLE's drafter against EAGLE-3's: what training each costs, and what it brings.

Both begin from the policy's last layer (`from_policy_layer`) and learn, by the spot trainer and with the config's
settings, from the same batches of the same answers, which the policy wrote to the task's prompts. Their turns
alternate, so that other work on the machine slows both down. They are compared when they have trained on the same
number of tokens, and again when the quicker one has gone on for as many seconds as the dearer one took (it has seen
the answers more often then).

Acceptance isn't estimated: the engine decodes prompts that nothing was trained on, sampled as in the rollout, with a
chain of `engine.speculation.depth` in every step.

Consumes: a config. Publishes: numbers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, get_args

import torch
import typer
from torch import Tensor

from tlt_pipeline.config import ConfigError, RunConfig
from tlt_pipeline.drafter.initial import fit_initial
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.start import TEXTS
from tlt_pipeline.drafter.streaming import document_of
from tlt_pipeline.drafter.texts import TextWriter
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.drafter.warmup import ANSWERS, TRAINING_SHARE
from tlt_pipeline.messages import RolloutRequest
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import DrafterKind
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.locate import locate_model
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.processes import slot_threads
from tlt_pipeline.scheduling.events import SubmitStep
from tlt_pipeline.tasks.mix import TaskMix
from tlt_services.acceptance import measure_acceptance
from tlt_services.step_requests import RequestWriter

KINDS: tuple[DrafterKind, ...] = get_args(DrafterKind)
HELD_OUT = 64
"""Prompts of step 0. Training has those of the steps behind it, but for the ones that come again."""
TURN_BATCHES = 4


def compare_kinds(config: RunConfig, seconds: float) -> dict[str, Any]:
    """`seconds`: of training, for the kind that needs more; the answers are written in a third of that. Raises
    ConfigError, ModelError, TaskError.

    Of each kind: trainable `parameters`, `unroll_steps`, `start_s` (fitting the start), `tokens_per_s` up to
    `equal_tokens`; at `start`, `equal_tokens` and `equal_seconds`: tokens and seconds trained, acceptance."""
    torch.set_num_threads(slot_threads(config))
    configs = {kind: of_kind(config, kind) for kind in KINDS}
    folder, device = locate_model(config.policy.model), choose_device(config.engine.device)
    policy = load_decoder(folder, choose_dtype(config.engine.dtype, device), device)
    tokenizer = load_tokenizer(folder)
    requests = held_out_requests(config, tokenizer)
    corpus = write_corpus(configs["eagle3"], policy, tokenizer, requests, seconds / TRAINING_SHARE)
    courses = {kind: Course(settled, policy, tokenizer, corpus, requests) for kind, settled in configs.items()}
    points = {kind: {"start": course.measure()} for kind, course in courses.items()}
    _train(list(courses.values()), seconds)
    for kind, course in courses.items():
        points[kind]["equal_tokens"] = course.measure()
    longest = max(course.seconds for course in courses.values())
    for kind, course in courses.items():
        course.train(seconds=longest)
        before = points[kind]["equal_tokens"]
        more = course.trainer.tokens_trained > before["tokens"]
        points[kind]["equal_seconds"] = course.measure() if more else before
    return {
        "answers": len(corpus.texts),
        "answer_tokens": sum(int(document.loss_mask.sum()) for document in corpus.documents),
        "held_out": len(requests),
        "strategy": f"eagle-{config.engine.speculation.depth}",
        **{kind: {**course.cost(points[kind]["equal_tokens"]), **points[kind]} for kind, course in courses.items()},
    }


def of_kind(config: RunConfig, kind: DrafterKind) -> RunConfig:
    drafter = config.drafter.model_copy(update={"kind": kind, "init": "from_policy_layer"})
    return config.model_copy(update={"drafter": drafter})


def _train(courses: Sequence[Course], seconds: float) -> None:
    """In turns of the same tokens, until one has trained for `seconds`."""
    tokens = 0
    while max(course.seconds for course in courses) < seconds:
        tokens += TURN_BATCHES * courses[0].trainer.settings.tokens_per_batch
        for course in courses:
            course.train(tokens=tokens)
    typer.echo(f"kinds of drafters: trained on {courses[0].trainer.tokens_trained} tokens each", err=True)


# --- what is learned from -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """What the policy wrote: whole texts, int64 [T] each; the same as documents, with features as EAGLE-3 reads them,
    whose last C numbers are what EAGLE's drafter reads."""

    texts: list[Tensor]
    documents: list[Document]

    def documents_for(self, feature_size: int) -> list[Document]:
        return [replace(document, hidden=document.hidden[:, -feature_size:]) for document in self.documents]


def held_out_requests(config: RunConfig, tokenizer: Tokenizer) -> list[RolloutRequest]:
    order = SubmitStep(step=0, policy_version=1, purpose="train", prompts=HELD_OUT, group_size=1)
    return RequestWriter(config, TaskMix(config.task, config.seed), tokenizer).write(order)


def write_corpus(
    config: RunConfig, policy: Decoder, tokenizer: Tokenizer, held_out: Sequence[RolloutRequest], seconds: float
) -> Corpus:
    """Answers for about `seconds`, fewer where `hidden_states.bytes_quota` would be exceeded: what a buffer drops would
    not be the same for both kinds. Those to a held-out prompt are left out. Raises ConfigError, TaskError."""
    began, corpus = time.monotonic(), Corpus([], [])
    writer = TextWriter(config, policy, tokenizer, config.rollout.max_new_tokens)
    kept_apart = {tuple(request.prompt.tolist()) for request in held_out}
    lengths = {len(prompt) for prompt in kept_apart}
    for rounds in count(1):
        texts, pieces = writer.write(rounds, ANSWERS)
        known = [any(tuple(text_T[:length].tolist()) in kept_apart for length in lengths) for text_T in texts]
        corpus.texts.extend(text_T for text_T, apart in zip(texts, known, strict=True) if not apart)
        fresh = [piece for piece in pieces if tuple(piece.request.prompt.tolist()) not in kept_apart]
        corpus.documents.extend(document_of(piece) for piece in fresh)
        if not any(document.loss_mask.any() for document in corpus.documents):
            raise ConfigError(
                "kinds of drafters: the policy's answers hold nothing to learn from: see task and "
                "rollout.max_new_tokens, or give --kinds-seconds 0"
            )
        size = sum(document.hidden.nbytes for document in corpus.documents)
        full = size * (rounds + 1) > config.hidden_states.bytes_quota * rounds
        if full or time.monotonic() - began >= seconds:
            break
    return corpus


# --- one kind -------------------------------------------------------------------------------------------------------


class Course:
    """One kind's drafter, its training so far, and how well it drafts. `seconds`: of training."""

    def __init__(
        self,
        config: RunConfig,
        policy: Decoder,
        tokenizer: Tokenizer,
        corpus: Corpus,
        requests: list[RolloutRequest],
    ) -> None:
        began = time.monotonic()
        drafter = fit_initial(config, policy, corpus.texts[:TEXTS])
        self.start_s = time.monotonic() - began
        self.config, self.policy, self.tokenizer, self.requests = config, policy, tokenizer, requests
        frozen = FrozenParts.of(policy, 0, policy.embed.weight.device)
        self.trainer = DrafterTrainer(config, drafter, 0, frozen, slot=0)
        self.trainer.buffer.add(corpus.documents_for(drafter.feature_size), 0, held_out=False)
        self.seconds = 0.0

    def train(self, *, tokens: float = float("inf"), seconds: float = float("inf")) -> None:
        """Until so many tokens, or for so many seconds, in all."""
        trainer = self.trainer
        done = trainer.train(seconds - self.seconds, lambda: trainer.tokens_trained >= tokens)
        self.seconds += done.seconds

    def measure(self) -> dict[str, Any]:
        """Of the moving average, which is what is published."""
        drafter = copy.deepcopy(self.trainer.average).to(self.policy.embed.weight.dtype)
        depth = self.config.engine.speculation.depth
        found = measure_acceptance(self.policy, drafter, self.tokenizer, self.config, self.requests, depth)
        return {
            "tokens": self.trainer.tokens_trained,
            "seconds": self.seconds,
            "acceptance_length": found.length,
            "acceptance_by_position": list(found.by_position),
            "verify_passes": found.drafts,
        }

    def cost(self, equal_tokens: dict[str, Any]) -> dict[str, Any]:
        return {
            "parameters": sum(parameter.numel() for parameter in self.trainer.parameters),
            "unroll_steps": self.trainer.unroll_steps,
            "start_s": self.start_s,
            "tokens_per_s": equal_tokens["tokens"] / max(equal_tokens["seconds"], 1e-9),
        }
