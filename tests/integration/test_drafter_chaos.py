"""Whatever happens to drafter trainers, the policy that is learned is the same to the bit: a run whose trainers are
killed and whose slots are recalled at random, against an undisturbed one. With `pytest -s` it says what it did."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import write_tiny_config
from tlt_pipeline.bus import Bus
from tlt_pipeline.config import LimitsConfig
from tlt_pipeline.messages import LeaseRecalled, slot_commands
from tlt_pipeline.scheduling.status import RunStatus
from tlt_services.status import StatusReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 10
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "slots__count": 3,
    "rollout__prompts_per_step": 4,
    "rollout__group_size": 4,
    "rollout__max_new_tokens": 200,
    "engine__max_batch": 8,
    "engine__max_context": 256,
    "learner__lr": 1e-2,
    "drafter__train__publish_every_s": 0.1,
    "limits__max_restarts": 1000,
}


REWARD = """
def share_of_digits(answer: str, entry: dict) -> float:
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)
"""


def write_config(folder: Path) -> Path:
    """A task that a random policy already scores in, differently from answer to answer: the policy must move."""
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{number}+{number}=", "answer": ""} for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(folder / "prompts.jsonl"), "verifier": "rewards:share_of_digits"}
    return write_tiny_config(folder, task__sources=[source], task__answer_pattern="(?s)(.+)", **SETTINGS)


@contextmanager
def started(config: Path, root: Path) -> Iterator[subprocess.Popen[bytes]]:
    kept = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "TLT_RUN_DIR")}
    command = (sys.executable, "-m", "tlt_services.cli", "run", str(config), "--run-dir", str(root))
    with root.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, cwd=root.parent, env=kept, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
            shutil.rmtree(Path("/dev/shm") / f"tlt-{(root / 'run_id').read_text().strip()}", ignore_errors=True)


def facts_of(root: Path) -> dict[str, Any]:
    """What must not depend on the trouble."""
    summary = json.loads((root / "summary.json").read_text())
    names = ("steps", "policy_version", "requests_trained", "reward_by_step", "tokens_by_step", "claim")
    return {
        "weights": weights_of(root, STEPS),
        **{name: summary[name] for name in names},
    }


def weights_of(root: Path, version: int) -> dict[str, bytes]:
    folder = root / "weights" / "policy" / f"v{version:06d}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


class Trouble:
    """Does to a running run's trainers what a seeded die says, whenever one holds a slot."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)
        self.done: Counter[str] = Counter()

    def make(self, process: subprocess.Popen[bytes]) -> None:
        while not (self.root / "redis_url").exists() and process.poll() is None:
            time.sleep(0.05)
        run_id, url = (self.root / "run_id").read_text().strip(), (self.root / "redis_url").read_text().strip()
        reader, troubled = StatusReader(url, run_id), set[tuple[int, int]]()
        while process.poll() is None:
            status = reader.read()
            for slot, lease in training(status):
                if (slot, lease) not in troubled and process.poll() is None:
                    troubled.add((slot, lease))
                    self._disturb(url, run_id, slot, lease)
            time.sleep(0.02)
        reader.close()

    def _disturb(self, url: str, run_id: str, slot: int, lease: int) -> None:
        what = self.random.choice(["kill", "recall", "recall", "nothing"])
        time.sleep(self.random.uniform(0.0, 0.3))
        if what == "recall":
            asyncio.run(recall(url, run_id, slot, lease))
        elif what == "kill" and not kill_trainer(self.root, slot):
            what = "nothing"
        self.done[what] += 1


def training(status: RunStatus | None) -> list[tuple[int, int]]:
    return [(slot.slot, slot.lease) for slot in status.slots if slot.holder == "drafter"] if status else []


async def recall(url: str, run_id: str, slot: int, lease: int) -> None:
    bus = await Bus.connect(url, run_id, LimitsConfig(), "trouble")
    order = LeaseRecalled(slot=slot, lease=lease, deadline_s=1.0, sent_at=time.time())
    await bus.append(slot_commands(slot, "drafter-trainer"), order)
    await bus.close()


def kill_trainer(root: Path, slot: int) -> bool:
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = "drafter-trainer" in words and str(root) in [*words, process.environ().get("TLT_RUN_DIR", "")]
            if ours and words[words.index("--slot") + 1] == str(slot):
                process.kill()
                return True
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            continue
    return False


def test_killed_trainers_and_recalled_slots_leave_the_policy_as_it_is(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    quiet, troubled = tmp_path / "quiet", tmp_path / "troubled"
    with started(config, quiet) as process:
        assert process.wait(200) == 0, quiet.with_suffix(".log").read_text()[-4000:]
    trouble = Trouble(troubled, seed=0)
    with started(config, troubled) as process:
        trouble.make(process)
        assert process.wait(10) == 0, troubled.with_suffix(".log").read_text()[-4000:]
    expected, found = facts_of(quiet), facts_of(troubled)
    summary = json.loads((troubled / "summary.json").read_text())
    sys.stdout.write(f"trouble made: {dict(trouble.done)}; counted: {summary['counts']}\n")
    assert trouble.done["kill"] >= 2 and trouble.done["recall"] >= 2, "too kind to show anything"
    assert summary["drafter_tokens_trained"] > 0
    assert weights_of(quiet, STEPS) != weights_of(quiet, 0), "a policy that doesn't move can't be moved elsewhere"
    assert found == expected
