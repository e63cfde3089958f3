"""What a run leaves to read: metrics.jsonl, TensorBoard scalars, summary.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import structlog
from pydantic import ValidationError

from tlt_pipeline.bus.journal import read_journal
from tlt_pipeline.config import RunConfig
from tlt_pipeline.rundir import RunDir, storing, write_atomic
from tlt_pipeline.scheduling.events import CompletionSeen
from tlt_pipeline.scheduling.ids import parse_request_id
from tlt_pipeline.scheduling.records import StepRecord, rebuild_record
from tlt_pipeline.scheduling.state import Account, Answer, Batch
from tlt_pipeline.scheduling.summary import summarise

_log: Any = structlog.get_logger("tlt.scheduler")


class RunLog:
    """The run's books on disk. A step may be appended twice (a crash between here and the saved state):
    the last line of a step counts."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._run = run
        self._config = config
        self._scalars = _open_scalars(run) if config.telemetry.tensorboard else None

    def read(self) -> dict[int, StepRecord]:
        """As `read_records`."""
        return read_records(self._run)

    def begin(self, step: int) -> None:
        """The run goes on with this step: later lines are of a life whose policy is gone, missing ones (a
        crash before they were written) are made again from the journal."""
        records = {done: record for done, record in self.read().items() if done < step}
        missing = sorted(set(range(step)) - set(records))
        if missing:
            records.update(self._rebuild(missing))
        if records or self._run.metrics.exists():
            lines = (record.model_dump_json() + "\n" for _, record in sorted(records.items()))
            write_atomic(self._run.metrics, "".join(lines))

    def append(self, record: StepRecord) -> None:
        """Raises StorageError."""
        line = record.model_dump_json() + "\n"
        with storing(self._run.metrics), self._run.metrics.open("ab+") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
        if self._scalars is not None:
            for name, value in scalars_of(record).items():
                self._scalars.add_scalar(name, value, record.step)
            self._scalars.flush()

    def summarise(self, trained: int, since: Account, evals: Mapping[int, float]) -> dict[str, Any]:
        """Writes summary.json, whole or not at all, and returns it."""
        records = [record for step, record in self.read().items() if step < trained]
        about = {"name": self._config.name, "seed": self._config.seed, "max_staleness": self._config.max_staleness}
        summary = {**summarise(records, since, evals), **about}
        write_atomic(self._run.summary, json.dumps(summary, indent=2) + "\n")
        return summary

    def close(self) -> None:
        if self._scalars is not None:
            self._scalars.close()

    def _rebuild(self, steps: list[int]) -> dict[int, StepRecord]:
        """Records of finished steps that have none, from the answers in the journal."""
        rollout = self._config.rollout
        answers: dict[int, dict[int, Answer]] = {step: {} for step in steps}
        versions: dict[int, int] = {}
        for completion in read_journal(self._run.journal, "completions"):
            name = parse_request_id(completion.request_id)
            if name is None or completion.purpose != "train" or completion.step not in answers:
                continue
            answer = CompletionSeen.of(completion).answer
            answers[completion.step][name.prompt * rollout.group_size + name.index] = answer
            versions[completion.step] = completion.policy_version
        rebuilt: dict[int, StepRecord] = {}
        for step, version in versions.items():
            of_step = Batch(
                step=step,
                purpose="train",
                policy_version=version,
                prompts=rollout.prompts_per_step,
                group_size=rollout.group_size,
                admitted_at=0.0,
                answers=answers[step],
            )
            rebuilt[step] = rebuild_record(of_step)
        lost = [step for step in steps if step not in rebuilt]
        _log.warning("metrics.jsonl: steps without a line", rebuilt=sorted(rebuilt), lost=lost)
        return rebuilt


def read_records(run: RunDir) -> dict[int, StepRecord]:
    """By step, ascending. Lines that a crash tore are skipped with a line in the log. Raises StorageError."""
    if not run.metrics.exists():
        return {}
    found: dict[int, StepRecord] = {}
    with storing(run.metrics):
        lines = run.metrics.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = StepRecord.model_validate_json(line)
        except ValidationError:
            _log.warning("metrics.jsonl: skipped a line that is no record", line=number)
            continue
        found[record.step] = record
    return dict(sorted(found.items()))


def scalars_of(record: StepRecord) -> dict[str, float]:
    """Under the names that people of the field know."""
    scalars = {
        "reward/mean": record.reward,
        "response_length/mean": record.answer_length_mean,
        "response_length/max": record.answer_length_max,
        "response_length/p99": record.answer_length_p99,
        "timing_s/gen": record.rollout_s,
        "timing_s/step": record.step_s,
        "timing_s/drafter": record.slot_idle_used_s,
        "timing_s/learner": record.learner_s,
        "timing_s/slot_idle": record.slot_idle_s,
        "timing_s/drafter_wait": record.drafter_wait_s,
        "drafter/tokens_trained": record.drafter_tokens_trained,
        "drafter/spec_decode/mean_acceptance_length": record.acceptance_length,
        "drafter/version": record.drafter_version,
        "perf/tokens_per_s": record.tokens_per_s,
        **{f"learner/{name}": value for name, value in record.learner.items()},
    }
    if record.eval_reward is not None:
        scalars["reward/eval"] = record.eval_reward
    return scalars


def step_facts(record: StepRecord) -> dict[str, float]:
    """For a line in the log."""
    names = ("reward", "acceptance_length", "rollout_s", "learner_s", "step_s")
    return {"step": record.step, **{name: round(getattr(record, name), 3) for name in names}}


def _open_scalars(run: RunDir) -> Any:
    from tensorboard.summary import Writer  # TensorBoard's own writer: it needs no torch

    return Writer(str(run.tensorboard))
