"""The scheduler as a process of its own on a real Redis, with the test as all the others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import wait_until
from tests.integration.scheduler_players import Players, log_lines, prepare, scheduler
from tlt_pipeline import messages as m
from tlt_pipeline.blobs import FileBlobs
from tlt_pipeline.bus.journal import read_journal
from tlt_pipeline.bus.server import find_binary, start_redis
from tlt_pipeline.config import RedisConfig
from tlt_pipeline.scheduling.status import STATUS_KEY, RunStatus

SUMMARY_FIELDS = {
    "steps",
    "reward_first",
    "reward_last",
    "reward_by_step",
    "policy_version",
    "drafter_versions_published",
    "acceptance_length_first",
    "acceptance_length_last",
    "rollout_s",
    "learner_s",
    "step_s",
    "slot_idle_s",
    "slot_idle_used_s",
    "requests_admitted",
    "requests_trained",
    "dead_letters",
    "answer_length_p50",
    "answer_length_p99",
}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(find_binary(), RedisConfig(maxmemory_mb=128), tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.mark.slow
async def test_a_run_from_start_to_summary(tmp_path: Path, redis_url: str) -> None:
    settings = {"rollout__temperature": 0.7, "rollout__top_k": 5, "rollout__stop": ["\n"], "seed": 4}
    run, config = prepare(tmp_path, steps=3, task__held_out=2, task__eval_every=2, **settings)
    players = Players(redis_url, run, config)
    async with scheduler(run, redis_url) as process, players.at_work():
        assert await process.exit_code() == 0
        await wait_until(lambda: players.ended.total() == 5)
        bus = await players.connect("observer")
        status = RunStatus.model_validate_json(await bus.load_state(STATUS_KEY) or b"")
        await bus.close()
    assert (status.phase, status.step, status.policy_version) == ("finished", 3, 3)
    summary = json.loads(run.summary.read_text())
    assert set(summary) > SUMMARY_FIELDS
    assert summary["steps"] == summary["policy_version"] == summary["drafter_versions_published"] == 3
    assert summary["requests_trained"] == summary["requests_admitted"] == 12 and summary["dead_letters"] == 0
    assert summary["reward_by_step"] == [0.5] * 3 and summary["acceptance_length_first"] == 2.0
    assert 0 < summary["slot_idle_used_s"] <= summary["slot_idle_s"]
    assert summary["eval_reward_by_version"] == {"0": 0.0, "2": 0.0, "3": 0.0}
    assert [order.step for order in players.orders] == [0, 1, 2] and set(players.trained.values()) == {1}
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2] and records[0]["learner"] == {"loss": 0.5}
    assert {r.request_id for r in read_journal(run.journal, "requests")} == set(players.requests)
    assert {c.request_id for c in read_journal(run.journal, "completions")} == set(players.requests)
    assert any(run.tensorboard.iterdir()) and players.shards and not players.blobs.names()
    check_requests(players.requests)
    assert not [line for line in log_lines(run) if line["level"] != "info"]


def check_requests(requests: dict[str, m.RolloutRequest]) -> None:
    """Seeded, sampled and evaluated as the first test's config says."""
    train = requests["s00000-p001-01"]
    assert (train.group_id, train.index, train.purpose) == ("s00000-p001", 1, "train")
    assert (train.sampling.temperature, train.sampling.top_k, train.sampling.stop) == (0.7, 5, ("\n",))
    assert train.sampling.stop_token_ids == (1,) and train.sampling.max_new_tokens == 24
    assert json.loads(train.entry)["answer"] and train.source == "chain_sum"
    sibling = requests["s00000-p001-00"]
    assert sibling.prompt == train.prompt and sibling.seed != train.seed
    evaluated = [request for request in requests.values() if request.purpose == "eval"]
    assert {r.request_id for r in evaluated} >= {"e00000-p000-00", "e00003-p001-00"}
    assert {r.sampling.temperature for r in evaluated} == {0.0}


@pytest.mark.slow
async def test_shards_of_a_worker_that_was_killed_are_collected_while_the_run_goes_on(
    tmp_path: Path, redis_url: str
) -> None:
    """On a volume that containers share nobody but the scheduler removes them: whole ones of which no message came, and
    the one that was being written."""
    run, config = prepare(tmp_path, steps=5)
    players = Players(redis_url, run, config)
    assert isinstance(players.blobs, FileBlobs)
    left = [players.blobs.root / name for name in ("unheard-of.safetensors", ".writing-half-0123")]

    def leave() -> bool:
        """Not before the scheduler has begun: a new run empties its folder."""
        if players.requests and not left[0].exists():
            for path in left:
                path.write_bytes(b"states")
                os.utime(path, (0, 0))
        return left[0].exists()

    async with scheduler(run, redis_url) as process, players.at_work():
        await wait_until(leave, 60.0)
        await wait_until(lambda: not any(path.exists() for path in left), 60.0)
        assert not run.summary.exists(), "while the run goes on"
        assert await process.exit_code() == 0
    removed = [line for line in log_lines(run) if line["event"] == "hidden states of a worker that died removed"]
    assert sum(line["shards"] for line in removed) == 2


@pytest.mark.slow
async def test_killed_again_and_again_it_trains_every_request_once(tmp_path: Path, redis_url: str) -> None:
    run, config = prepare(tmp_path, steps=4, rollout__group_size=4, max_staleness=1, learner__colocated=False)
    players = Players(redis_url, run, config)
    async with players.at_work():
        for kill_at in (5, 20):
            async with scheduler(run, redis_url) as process:
                await wait_until(lambda count=kill_at: len(players.requests) >= count, 60.0)
                await process.kill()
        async with scheduler(run, redis_url) as process:
            assert await process.exit_code() == 0
    assert set(players.trained.values()) == {1} and set(players.trained) == set(players.requests)
    summary = json.loads(run.summary.read_text())
    assert summary["requests_trained"] == summary["requests_admitted"] == 32
    assert len(summary["reward_by_step"]) == 4 and summary["slot_idle_used_s"] <= summary["slot_idle_s"]
    assert {request.step - request.policy_version for request in players.requests.values()} <= {0, 1}


@pytest.mark.slow
async def test_a_stopped_run_goes_on_with_another_redis(tmp_path: Path, redis_url: str) -> None:
    run, config = prepare(tmp_path, steps=5)
    first = Players(redis_url, run, config)
    async with scheduler(run, redis_url) as process, first.at_work():
        await wait_until(lambda: first.version >= 2, 60.0)
        process.stop()
        assert await process.exit_code() == 0
    assert not run.summary.exists() and not first.ended, "stopping is no end of the run"
    lines = run.metrics.read_text().splitlines(keepends=True)
    torn = [line for line in lines if json.loads(line)["step"] != 0]  # a line that a crash ate, and half a line
    run.metrics.write_text("".join(torn) + lines[0][:40])
    with start_redis(find_binary(), RedisConfig(maxmemory_mb=64), tmp_path / "redis") as server:
        second = Players(server.url, run, config, version=first.version)
        async with scheduler(run, server.url) as process, second.at_work():
            assert await process.exit_code() == 0
    assert [order.step for order in second.orders] == list(range(first.version, 5))
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == summary["policy_version"] == 5 and summary["requests_trained"] == 20
    assert summary["reward_by_step"] == [0.5] * 5, "the step without a line was made again from the journal"
    assert summary["counts"]["record_rebuilt"] >= 1
    assert 3 <= summary["drafter_versions_published"] <= 5


async def test_a_prompt_that_does_not_fit_is_the_users_to_mend(tmp_path: Path, redis_url: str) -> None:
    run, config = prepare(tmp_path, engine__max_context=30)
    players = Players(redis_url, run, config)
    async with scheduler(run, redis_url) as process, players.at_work():
        assert await process.exit_code() == 2
        await wait_until(lambda: players.ended.total() == 5)
    (failed,) = [line for line in log_lines(run) if line["event"] == "failed"]
    assert "prompt" in failed["reason"] and "'chain_sum'" in failed["reason"]
    assert "raise engine.max_context" in failed["reason"] and "Traceback" not in run.log("scheduler").read_text()


@pytest.mark.parametrize("code", [2, 3])
async def test_what_another_process_fails_of_ends_the_run(tmp_path: Path, redis_url: str, code: int) -> None:
    run, config = prepare(tmp_path)
    players = Players(redis_url, run, config)
    bus = await players.connect("learner")
    async with scheduler(run, redis_url) as process:
        failure = m.RunFailed(reason="learner: NaN in the loss", code=code, **players.stamp("learner", -1))
        await bus.append(m.EVENTS, failure)
        assert await process.exit_code() in ((2,) if code == 2 else (1, 3))
    status = RunStatus.model_validate_json(await bus.load_state(STATUS_KEY) or b"")
    assert (status.phase, status.reason) == ("failed", "learner: NaN in the loss")
    await bus.close()


async def test_it_says_for_whom_it_waits(tmp_path: Path, redis_url: str) -> None:
    run, config = prepare(tmp_path)
    players = Players(redis_url, run, config)

    def said(text: str) -> bool:
        return any(line["event"].startswith(f"waiting for {text}") for line in log_lines(run))

    async with scheduler(run, redis_url):
        await wait_until(lambda: said("the learner's first policy version"), 60.0)
        bus = await players.connect("learner")
        await players.publish(bus, "policy", 0)
        await wait_until(lambda: said("a rollout worker"), 60.0)
        await bus.close()


async def test_two_schedulers_of_one_run_do_not_both_decide(tmp_path: Path, redis_url: str) -> None:
    run, config = prepare(tmp_path)
    players = Players(redis_url, run, config)
    bus = await players.connect("learner")
    async with scheduler(run, redis_url) as first:
        await wait_until(lambda: any("waiting" in line["event"] for line in log_lines(run)), 60.0)
        async with scheduler(run, redis_url) as second:
            assert await first.exit_code() == 1
            assert second.process.returncode is None
    assert "stop one of the two" in run.log("scheduler").read_text()
    await bus.close()
