"""What `tlt bench engine` measures on: a policy, its drafter, and requests.

From a run directory: the newest policy and drafter, and the recorded requests of one slot in a late step, those that
finished last in front: when B answers are left in a real rollout, it is those. From a model folder: the tasks of
`--config`, the lines of `--prompts`, or reasoning-gym's chain_sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from tlt_pipeline.config import ConfigError, RunConfig, SpeculationConfig, load_config, validate_config
from tlt_pipeline.engine.replay import Recorded
from tlt_pipeline.engine.strategies import Strategy
from tlt_pipeline.messages import Array, RolloutRequest
from tlt_pipeline.models.checkpoint import load_decoder, load_drafter
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import EagleDrafter
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.locate import locate_model
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.scheduling.events import SubmitStep
from tlt_pipeline.scheduling.ids import RequestId, seed_of
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import sampling_of
from tlt_pipeline.weights import WeightsMissing, WeightStore
from tlt_services.bench_options import BenchOptions
from tlt_services.replay import read_recorded
from tlt_services.step_requests import RequestWriter

LATE_STEPS = 4
"""The recorded batch is that with the longest answer among so many last steps."""
PLAIN_ANSWER = 256
"""Tokens of an answer at most, where no config says it."""


@dataclass(frozen=True)
class Models:
    """A policy with what speculates for it. `drafter` is None where there is none."""

    policy: Decoder
    policy_version: int
    drafter: EagleDrafter | None
    drafter_version: int


@dataclass(frozen=True)
class Tail:
    """A batch to decode to the end. `recorded`: the tokens that a run wrote with `models`, by request id."""

    models: Models
    requests: list[RolloutRequest]
    recorded: dict[str, list[int]]


@dataclass
class Inputs:
    config: RunConfig
    dtype: torch.dtype
    tokenizer: Tokenizer
    models: Models
    requests: list[RolloutRequest]
    tail: Tail


def load_inputs(options: BenchOptions) -> Inputs:
    """Raises ConfigError, ModelError, WeightsMissing, and what prompts and tokenizer refuse."""
    return _from_folder(options) if options.run_dir is None else _from_run(options, RunDir(options.run_dir))


def widen(config: SpeculationConfig, wanted: Sequence[Strategy], has_drafter: bool) -> SpeculationConfig:
    """The config with all wanted strategies in it, so that the engine makes room for them. Raises ConfigError."""
    eagle = [each for each in wanted if each.drafter == "eagle"]
    ngrams = [each.depth for each in wanted if each.drafter == "ngram"]
    if eagle and not has_drafter:
        raise ConfigError(f"{eagle[0]} needs a trained drafter: give --drafter FOLDER, or a run directory as --model")
    trees = [str(each).removeprefix("eagle-") for each in eagle if each.is_tree]
    kind = "eagle" if has_drafter else "ngram"
    return config.model_copy(
        update={
            "drafter": kind,
            "depth": max(config.depth, *(each.depth for each in eagle if not each.is_tree), 1),
            "ngram_depths": tuple(dict.fromkeys([*config.ngram_depths, *ngrams])),
            "trees": tuple(dict.fromkeys([*config.trees, *trees])),
        }
    )


def endless_requests(requests: Sequence[RolloutRequest]) -> Iterator[RolloutRequest]:
    """From the second time on with other seeds and names: the same answer twice would tell an n-gram drafter all."""
    yield from requests
    for turn in count(1):
        for request in requests:
            name = f"{request.request_id}+{turn}"
            yield request.model_copy(update={"request_id": name, "seed": seed_of(request.seed, name)})


def fit(requests: Sequence[RolloutRequest], version: int, limit: int) -> list[RolloutRequest]:
    """For this policy version and context: answers are cut where they would not fit. Raises ConfigError."""
    fitting: list[RolloutRequest] = []
    for request in requests:
        room = limit - request.prompt.length
        if room < 1 or request.prompt.length < 2:
            raise ConfigError(
                f"the prompt of {request.request_id} has {request.prompt.length} tokens, and the context holds "
                f"{limit}: give prompts of 2 to {limit - 1} tokens, or raise engine.max_context"
            )
        sampling = request.sampling.model_copy(update={"max_new_tokens": min(request.sampling.max_new_tokens, room)})
        fitting.append(request.model_copy(update={"policy_version": version, "sampling": sampling}))
    return fitting


# --- from a run directory ---------------------------------------------------------------------------------------------


def _from_run(options: BenchOptions, run: RunDir) -> Inputs:
    config = load_config(run.config, options.overrides)
    store = WeightStore.of_run(run.root, config)
    kept = store.versions("policy")
    if not kept:
        raise WeightsMissing(f"{run.root} has no policy version yet: let its first step begin")
    loader = _Loader(options, config, store)
    batch, others = _choose_batch(list(read_recorded(run).values()), set(kept), run)
    latest = store.latest("drafter")
    models = loader.load(kept[-1], None if latest is None else latest.version)
    tail_version = batch[0].request.policy_version
    tail_drafter = _drafter_of(batch, store)
    same = tail_version == models.policy_version and tail_drafter == models.drafter_version
    return Inputs(
        config,
        loader.dtype,
        load_tokenizer(store.folder("policy", kept[-1])),
        models,
        [record.request for record in (*batch, *others)],
        Tail(
            models if same else loader.load(tail_version, tail_drafter),
            [record.request for record in sorted(batch, key=lambda record: record.request.request_id)],
            {record.request.request_id: record.completion.tokens.tolist() for record in batch},
        ),
    )


class _Loader:
    def __init__(self, options: BenchOptions, config: RunConfig, store: WeightStore) -> None:
        self._store, self._drafter = store, options.drafter
        self.device = choose_device(config.engine.device)
        self.dtype = choose_dtype(options.dtype or config.engine.dtype, self.device)

    def load(self, version: int, drafter_version: int | None) -> Models:
        policy = self._store.load_policy(version, dtype=self.dtype, device=self.device)
        if self._drafter is not None:
            return Models(policy, version, load_drafter(self._drafter, policy.config, self.dtype, self.device), 1)
        if drafter_version is None:
            return Models(policy, version, None, 0)
        drafter = self._store.load_drafter(drafter_version, policy.config, dtype=self.dtype, device=self.device)
        return Models(policy, version, drafter, drafter_version)


def _choose_batch(recorded: list[Recorded], kept: set[int], run: RunDir) -> tuple[list[Recorded], list[Recorded]]:
    """What one slot answered with one policy version in a late step, the last to finish first; and all others of these
    steps. Raises ConfigError."""
    shares: dict[tuple[int, int, int], list[Recorded]] = defaultdict(list)
    for record in recorded:
        request = record.request
        if request.purpose == "train" and request.policy_version in kept:
            shares[request.step, record.completion.slot, request.policy_version].append(record)
    if not shares:
        raise ConfigError(f"{run.root} has no answers of a policy version that is kept: let a step of it finish")
    steps = sorted({step for step, _, _ in shares})[-LATE_STEPS:]

    def longest(key: tuple[int, int, int]) -> tuple[int, int, int]:
        lengths = [record.completion.tokens.length for record in shares[key]]
        return max(lengths), sum(lengths), key[0]

    late = [key for key in shares if key[0] in steps]
    chosen = max(late, key=longest)
    others = [record for key in sorted(late) if key != chosen for record in shares[key]]
    return sorted(shares[chosen], key=lambda record: -record.completion.finished_at), others


def _drafter_of(batch: list[Recorded], store: WeightStore) -> int | None:
    """The newest version that drafted for these answers, or was there when they were written."""
    kept = store.versions("drafter")
    used = {version for record in batch for version in record.completion.draft.drafter_versions}
    step = batch[0].request.step
    before = [version for version in kept if store.find("drafter", version).step < step]
    return max(used & set(kept), default=before[-1] if before else None)


# --- from a model folder ----------------------------------------------------------------------------------------------


def _from_folder(options: BenchOptions) -> Inputs:
    folder = locate_model(options.model)
    config = _config_for(options, folder)
    device = choose_device(config.engine.device)
    dtype = choose_dtype(options.dtype or config.engine.dtype, device)
    tokenizer = load_tokenizer(folder)
    policy = load_decoder(folder, dtype, device)
    drafter = None if options.drafter is None else load_drafter(options.drafter, policy.config, dtype, device)
    models = Models(policy, 0, drafter, 0 if drafter is None else 1)
    rows = max(options.batches)
    if options.prompts is None:
        groups = -(-2 * rows // config.rollout.group_size)
        order = SubmitStep(
            step=0, purpose="train", prompts=groups, group_size=config.rollout.group_size, policy_version=0
        )
        requests = RequestWriter(config, TaskMix(config.task, options.seed), tokenizer).write(order)
    else:
        requests = _read_prompts(options.prompts, config, tokenizer, options.seed)
    return Inputs(
        config, dtype, tokenizer, models, requests, Tail(models, list(islice(endless_requests(requests), rows)), {})
    )


def _config_for(options: BenchOptions, folder: Path) -> RunConfig:
    if options.config is not None:
        return load_config(options.config, options.overrides)
    content: dict[str, Any] = {
        "seed": options.seed,
        "policy": {"model": str(folder)},
        "task": {"sources": [{"name": "chain_sum"}], "held_out": 0},
        "rollout": {"max_new_tokens": PLAIN_ANSWER, "group_size": 1},
        "engine": {"max_context": 2 * PLAIN_ANSWER, "max_batch": max(options.batches)},
    }
    return validate_config(content, "tlt bench engine")


def _read_prompts(file: Path, config: RunConfig, tokenizer: Tokenizer, seed: int) -> list[RolloutRequest]:
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{file} has no prompt in it: write one a line")
    sampling = sampling_of(config.rollout, tokenizer.eos_ids)
    requests: list[RolloutRequest] = []
    for number, line in enumerate(lines):
        chat = tokenizer.has_chat_template and config.task.chat != "off"
        tokens = tokenizer.apply_chat([{"role": "user", "content": line}]) if chat else tokenizer.encode_prompt(line)
        name = RequestId("train", 0, number, 0)
        requests.append(
            RolloutRequest(
                request_id=str(name),
                group_id=name.group,
                step=0,
                index=0,
                policy_version=0,
                seed=seed_of(seed, str(name)),
                prompt=Array.of(tokens),
                sampling=sampling,
                source=file.name,
                entry="{}",
            )
        )
    return requests
