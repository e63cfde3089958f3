"""Shared-noise proposals against greedy ones, on answers that a run recorded: the same policy, drafter and requests
decoded twice. Greedy ones are what EAGLE proposes, the drafter's likeliest tokens; the policy draws with its noise in
both, so the answers are the same, and only how many proposals it accepts differs (Daliri, Musco, Suresh, arXiv
2408.07978).

Consumes: a run directory. Publishes: numbers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tlt_pipeline.config import RunConfig, load_config
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.replay import Recorded
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.engine.strategies import Fixed, chain
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.processes import slot_threads
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightStore
from tlt_services.acceptance import acceptance_of
from tlt_services.replay import read_recorded

ANSWERS = 128


def compare_proposals(run_dir: Path) -> dict[str, Any]:
    """Chains of the config's depth from the run's newest drafter, on answers of its last step. Raises WeightsMissing.

    `acceptance_by_position`: share of the verify passes in which that proposal and all before it were accepted;
    `identical`: answers that came out as recorded both times."""
    run = RunDir(run_dir)
    config = load_config(run.config)
    torch.set_num_threads(slot_threads(config))
    records = _last_step(run, config.seed)
    engine = _open(run, config, records[0].request.policy_version)
    requests = [record.request for record in records]
    drafting = engine.drafting
    assert drafting is not None
    decoded: dict[str, list[Finished]] = {}
    for name, greedy in (("shared_noise", False), ("greedy", True)):
        engine.drafting = replace(drafting, greedy=greedy)
        decoded[name] = decode_all(engine, requests)
    recorded = [record.completion.tokens.tolist() for record in records]
    both = zip(recorded, *decoded.values(), strict=True)
    return {
        "policy_version": engine.policy_version,
        "drafter_version": engine.drafter_version,
        "answers": len(records),
        "identical": sum(before == shared.tokens == greedy.tokens for before, shared, greedy in both),
        **{name: _figures(answers, config.engine.speculation.depth) for name, answers in decoded.items()},
    }


def _last_step(run: RunDir, seed: int) -> list[Recorded]:
    """Answers of one policy version, `ANSWERS` at most."""
    records = [record for record in read_recorded(run).values() if record.request.purpose == "train"]
    newest = max(record.request.policy_version for record in records)
    last = [record for record in records if record.request.policy_version == newest]
    last.sort(key=lambda record: record.request.request_id)
    return random.Random(seed).sample(last, min(ANSWERS, len(last)))


def _open(run: RunDir, config: RunConfig, version: int) -> Engine:
    """With what a rollout worker had when it wrote these answers, but for the drafter, which is the newest."""
    store = WeightStore.of_run(run.root, config)
    device = choose_device(config.engine.device)
    dtype = choose_dtype(config.engine.dtype, device)
    policy = store.load_policy(version, dtype=dtype, device=device)
    tokenizer = load_tokenizer(store.folder("policy", version))
    engine = Engine(policy, version, tokenizer, config.engine, context_window=config.drafter.context_window)
    engine.choice = Fixed(chain("eagle", config.engine.speculation.depth))
    published = store.latest("drafter")
    assert published is not None, "a run with a trained drafter has its first version"
    drafter = store.load_drafter(published, policy.config, dtype=dtype, device=device)
    engine.set_drafter(drafter, published.version)
    return engine


def _figures(answers: list[Finished], depth: int) -> dict[str, Any]:
    found = acceptance_of(answers, depth)
    return {
        "acceptance_length": found.length,
        "acceptance_by_position": list(found.by_position),
        "verify_passes": found.drafts,
    }
