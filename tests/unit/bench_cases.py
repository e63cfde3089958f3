"""Run directories as finished runs leave them, for what sets runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests import samples
from tests.tiny import tiny_settings
from tlt_pipeline.bus.journal import Journal
from tlt_pipeline.messages import Array
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.scheduling.records import StepRecord, account_facts, answer_facts
from tlt_pipeline.scheduling.state import Account, Answer
from tlt_pipeline.scheduling.summary import summarise


def record(step: int, accepted: int, account: Account, rollout_s: float = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        policy_version=step + 1,
        rollout_version=step,
        requests_admitted=1,
        requests_trained=1,
        requests_dead=0,
        tokens_per_s=5.0,
        rollout_s=rollout_s,
        yield_wait_s=0.1,
        learner_s=1.0,
        step_s=rollout_s + 1.0,
        drafter_version=1 + (step if account.used_s else 0),
        **answer_facts([Answer(step / 10, 60, 20, accepted, verified=True)]),
        **account_facts(account),
    )


def write_run(
    root: Path, accepted: Sequence[int], account: Account, tokens: int = 8, rollout_s: Sequence[float] = ()
) -> Path:
    """Five answers. `accepted`: in 20 verify passes, by step; `tokens`: the last token of the last answer;
    `rollout_s`: by step."""
    run = RunDir(root)
    root.mkdir()
    seconds = rollout_s or [2.0] * len(accepted)
    records = [record(step, count, account, seconds[step]) for step, count in enumerate(accepted)]
    run.summary.write_text(json.dumps(summarise(records, Account(counts={"answers_exact": 5}), {})))
    run.config.write_text(yaml.safe_dump(tiny_settings(Path("nowhere"), engine__speculation__depth=6)))
    with Journal(run.journal) as journal:
        for number in range(5):
            last = tokens if number == 4 else 8
            journal.append(samples.completion(samples.request(number), tokens=Array.of([7, last])))
    return root
