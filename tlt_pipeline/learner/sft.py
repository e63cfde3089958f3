"""Supervised training: a cold start for a pretrained policy, or a small policy from nothing.

Loss falls on the response and the token that ends it. The result is a Hugging Face folder, there at once or
not at all, with `sft.json` beside the weights: settings, seed, loss and time.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from tlt_pipeline.config import ConfigError, RunConfig, SFTConfig
from tlt_pipeline.folders import draft_folder, replace_folder
from tlt_pipeline.learner.batching import Example, bucket, collate
from tlt_pipeline.learner.compute import choose_scoring, use_threads
from tlt_pipeline.learner.optimizer import cosine, make_optimizer, update
from tlt_pipeline.learner.scoring import Scored, Scoring, backpropagate
from tlt_pipeline.learner.sft_data import draw_batches, encode_pairs, find_alphabet, read_pairs
from tlt_pipeline.models.architecture import parse_config, read_hf_config
from tlt_pipeline.models.checkpoint import load_decoder, save_decoder
from tlt_pipeline.models.decoder import Decoder, initialize
from tlt_pipeline.models.locate import locate_model
from tlt_pipeline.models.tokenizer import Tokenizer, character_tokenizer, load_tokenizer


@dataclass(frozen=True)
class SFTReport:
    """`loss_first` and `loss_last`: nats per response token, means over the first and last tenth of the
    steps. `tokens`: trained on, prompts included; `skipped`: examples longer than the model's context."""

    folder: str
    steps: int
    examples: int
    skipped: int
    tokens: int
    seconds: float
    loss_first: float
    loss_last: float


@dataclass(frozen=True)
class Student:
    model: Decoder
    tokenizer: Tokenizer
    hf_config: dict[str, Any]


def run_sft(config: RunConfig, log: Any = None) -> SFTReport:
    """Trains as `config.sft` says and writes `sft.out`. The same config, seed and number of threads give the
    same weights to the bit.

    Raises ConfigError, TaskError or ModelError for what the user gave, NonFiniteUpdate if training
    diverges."""
    log = log or structlog.get_logger()
    settings = config.sft
    if settings is None:
        raise ConfigError("this config has no sft section: add one (sft.out at least)")
    out = _check_out(Path(settings.out))
    threads = use_threads(settings.threads)
    scoring = choose_scoring(config.learner.device, settings.dtype)
    started = time.monotonic()
    student, examples, skipped = _prepare(config, settings)
    student.model.to(scoring.device)
    if skipped:
        log.warning("examples longer than the model's context are left out", skipped=skipped)
    log.info("supervised training", examples=len(examples), steps=settings.steps, threads=threads)
    losses, tokens = _train(config, settings, student.model, examples, scoring, log)
    tenth = max(1, len(losses) // 10)
    report = SFTReport(
        folder=str(out),
        steps=settings.steps,
        examples=len(examples),
        skipped=skipped,
        tokens=tokens,
        seconds=round(time.monotonic() - started, 1),
        loss_first=sum(losses[:tenth]) / tenth,
        loss_last=sum(losses[-tenth:]) / tenth,
    )
    _write(out, student, config, report)
    log.info("supervised training done", **asdict(report))
    return report


def _prepare(config: RunConfig, settings: SFTConfig) -> tuple[Student, list[Example], int]:
    """The model to train, and its examples; the number of those that don't fit its context."""
    pairs = read_pairs(config, settings.data)
    if settings.new_model is None:
        source = locate_model(config.policy.model)
        student = Student(load_decoder(source), load_tokenizer(source), read_hf_config(source))
    else:
        tokenizer = character_tokenizer(find_alphabet(pairs, config.task))
        student = _start_model(settings.new_model, tokenizer, config.seed)
    examples = encode_pairs(pairs, config.task, student.tokenizer)
    context = student.model.config.max_position_embeddings
    fitting = [example for example in examples if len(example.tokens) <= context]
    if not fitting:
        raise ConfigError(
            f"every example is longer than the model's context of {context} tokens: take shorter ones, or "
            f"a model with more max_position_embeddings"
        )
    return student, fitting, len(examples) - len(fitting)


def _start_model(new_model: dict[str, Any], tokenizer: Tokenizer, seed: int) -> Student:
    ids = {"eos_token_id": tokenizer.eos_ids[0], "pad_token_id": tokenizer.pad_id, "bos_token_id": None}
    hf_config = {**new_model, **ids, "vocab_size": tokenizer.vocab_size}
    model = Decoder(parse_config(hf_config, "sft.new_model"))
    initialize(model, torch.Generator().manual_seed(seed))
    return Student(model, tokenizer, hf_config)


def _train(
    config: RunConfig,
    settings: SFTConfig,
    model: Decoder,
    examples: list[Example],
    scoring: Scoring,
    log: Any,
) -> tuple[list[float], int]:
    """Loss of each step, and the tokens trained on."""
    optimizer = make_optimizer(model, settings.lr, settings.weight_decay, settings.betas)
    batches = draw_batches(examples, settings.tokens_per_batch, config.seed)
    losses: list[float] = []
    tokens, logged_tokens, logged_at = 0, 0, time.monotonic()
    for step in range(settings.steps):
        chosen = [examples[index] for index in next(batches)]
        loss = _add_gradients(model, chosen, config.learner.tokens_per_microbatch, scoring)
        lr = settings.lr * cosine(step, settings.steps, settings.warmup_steps, settings.min_lr_share)
        norm = update(model, optimizer, lr, settings.max_grad_norm, loss)
        losses.append(loss)
        tokens += sum(len(example.tokens) for example in chosen)
        if (step + 1) % settings.log_every == 0 or step + 1 == settings.steps:
            now = time.monotonic()
            speed = round((tokens - logged_tokens) / (now - logged_at))
            log.info(
                "step",
                step=step + 1,
                of=settings.steps,
                loss=round(sum(losses[-settings.log_every :]) / len(losses[-settings.log_every :]), 4),
                grad_norm=round(norm, 3),
                lr=f"{lr:.2e}",
                tokens_per_s=speed,
            )
            logged_tokens, logged_at = tokens, now
    return losses, tokens


def _add_gradients(model: Decoder, examples: list[Example], budget: int, scoring: Scoring) -> float:
    """Gradients of the mean loss over the batch's response tokens; that loss."""
    answers = sum(example.answer for example in examples)

    def negative_log_likelihood(scored: Scored, rows: slice) -> torch.Tensor:
        return -scored.logprobs_A.sum() / answers

    total = 0.0
    for indices in bucket([len(example.tokens) for example in examples], budget):
        batch = collate(examples, indices, scoring.device)
        loss, _ = backpropagate(model, batch, scoring, negative_log_likelihood)
        total += loss
    return total


def _check_out(out: Path) -> Path:
    if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"sft.out {out} exists and is no model folder: choose another or remove it")
    return out


def _write(out: Path, student: Student, config: RunConfig, report: SFTReport) -> None:
    """Atomic: the folder is written beside its place, synced and renamed. One that was there makes way."""
    settings = config.sft
    assert settings is not None
    with draft_folder(out) as folder:
        save_decoder(student.model.cpu(), folder, student.hf_config, dtype=getattr(torch, settings.save_dtype))
        student.tokenizer.save(folder)
        record = {"report": asdict(report), "seed": config.seed, "sft": settings.model_dump(mode="json")}
        (folder / "sft.json").write_text(json.dumps(record, indent=2) + "\n")
        replace_folder(folder, out)
