"""`tlt replay RUN_DIR`: recorded requests once more, with the recorded policy versions, from the run directory alone.

Consumes: the journal and the weight sets of a run. Publishes: a report. Waits for nothing: no Redis, no other process.
"""

from __future__ import annotations

import json as jsonlib
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import typer

from tlt_pipeline.bus.journal import read_journal
from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.replay import Recorded, replay
from tlt_pipeline.messages import WeightsPublished
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.processes import slot_threads
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.telemetry.logging import configure_logging
from tlt_pipeline.weights import WeightsMissing, WeightStore

DEFAULT_SAMPLE = 32
TELL_EVERY_S = 5.0


def main(run_dir: Path, *, request: str | None, all: bool, sample: int | None, drafter: str, json: bool) -> int:
    """0: every answer came out the same; 1: some didn't. Raises ConfigError for what isn't in the run."""
    configure_logging()
    run = RunDir(run_dir)
    config = load_config(run.config)
    torch.set_num_threads(slot_threads(config))
    chosen = _choose(read_recorded(run), request, all, sample, config.seed)
    by_version: dict[int, list[Recorded]] = defaultdict(list)
    for record in chosen:
        by_version[record.request.policy_version].append(record)
    report: dict[str, Any] = {"requests": 0, "identical": 0, "diverged": [], "skipped": 0, "claim": None}
    telling = Telling(len(chosen))
    store = WeightStore.of_run(run.root, config)
    published = _find_drafter(store, drafter)
    engine: Engine | None = None
    for version, records in sorted(by_version.items()):
        try:
            engine = _load_version(store, config, version, published, engine)
        except WeightsMissing as error:
            typer.echo(f"{len(records)} requests skipped: {error}", err=True)
            report["skipped"] += len(records)
            continue
        _replay_version(engine, records, report)
        telling.update(report["requests"] + report["skipped"])
    if engine is None:
        raise WeightsMissing("none of these requests' policy versions is kept: raise weights.keep in the next run")
    if request is not None:
        report["answer"] = _describe(chosen[0], engine.tokenizer)
    _print(report, json)
    return 0 if report["identical"] == report["requests"] else 1


def read_recorded(run: RunDir) -> dict[str, Recorded]:
    """The finished requests in the run's journal, by id."""
    requests = {entry.request_id: entry for entry in read_journal(run.journal, "requests")}
    return {
        entry.request_id: Recorded(requests[entry.request_id], entry)
        for entry in read_journal(run.journal, "completions")
        if entry.request_id in requests
    }


def _choose(
    recorded: dict[str, Recorded], request: str | None, everything: bool, sample: int | None, seed: int
) -> list[Recorded]:
    if not recorded:
        raise ConfigError("the run's journal holds no finished request yet: let a step begin first")
    if request is not None:
        if request not in recorded:
            known = sorted(recorded)
            raise ConfigError(f"no finished request {request!r} in the journal; ids run from {known[0]} to {known[-1]}")
        return [recorded[request]]
    names = sorted(recorded)
    if not everything:
        count = min(sample or DEFAULT_SAMPLE, len(names))
        names = sorted(random.Random(seed).sample(names, count))
    return [recorded[name] for name in names]


def _replay_version(engine: Engine, records: list[Recorded], report: dict[str, Any]) -> None:
    diverged = replay(engine, records)
    report["claim"] = engine.claim
    report["requests"] += len(records)
    report["identical"] += len(records) - len(diverged)
    report["diverged"] += [divergence.as_dict() for divergence in diverged]


class Telling:
    """A line on stderr every `TELL_EVERY_S`: decoding a whole run again takes about as long as its rollouts."""

    def __init__(self, total: int) -> None:
        self._total, self._last = total, time.monotonic()

    def update(self, done: int) -> None:
        if time.monotonic() - self._last > TELL_EVERY_S:
            self._last = time.monotonic()
            typer.echo(f"{done} of {self._total} answers", err=True)


def _describe(record: Recorded, tokenizer: Tokenizer) -> dict[str, Any]:
    """The recorded answer, for people."""
    done = record.completion
    return {
        "request_id": done.request_id,
        "policy_version": done.policy_version,
        "prompt": tokenizer.decode(done.prompt.tolist()),
        "text": tokenizer.decode(done.tokens.tolist()),
        "tokens": done.tokens.length,
        "finish_reason": done.finish_reason,
        "reward": done.reward,
        "acceptance_length": 1.0 + done.draft.accepted / max(done.draft.drafts, 1),
        "drafter_versions": list(done.draft.drafter_versions),
    }


def _find_drafter(store: WeightStore, wanted: str) -> WeightsPublished | None:
    """`wanted`: none, latest or a version. Raises ConfigError: there is no such one."""
    if wanted == "none":
        return None
    kept = store.versions("drafter")
    if not kept:
        raise ConfigError("the run has no drafter version: give --drafter none")
    if wanted != "latest" and int(wanted) not in kept:
        raise ConfigError(
            f"--drafter {wanted}: the run keeps versions {kept[0]} to {kept[-1]}; give one, latest or none"
        )
    return store.latest("drafter") if wanted == "latest" else store.find("drafter", int(wanted))


def _load_version(
    store: WeightStore, config: RunConfig, version: int, drafter: WeightsPublished | None, engine: Engine | None
) -> Engine:
    """One engine for all versions: what it may claim is checked once. Raises WeightsMissing."""
    device = choose_device(config.engine.device)
    dtype = choose_dtype(config.engine.dtype, device)
    policy = store.load_policy(version, dtype=dtype, device=device)
    if engine is not None:
        engine.set_policy(policy, version)
        return engine
    engine = Engine(policy, version, load_tokenizer(store.folder("policy", version)), config.engine)
    if drafter is not None:
        engine.set_drafter(store.load_drafter(drafter, policy.config, dtype=dtype, device=device), drafter.version)
    return engine


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(jsonlib.dumps(report))
        return
    for name, value in report.get("answer", {}).items():
        typer.echo(f"{name:<18}{value}")
    typer.echo(f"{report['identical']} of {report['requests']} answers identical (claim: {report['claim']})")
    for part in report["diverged"]:
        typer.echo(
            f"  {part['request_id']} parts at token {part['position']}: recorded {part['recorded_token']} "
            f"({part['recorded_score']}), replayed {part['replayed_token']} ({part['replayed_score']})"
        )
