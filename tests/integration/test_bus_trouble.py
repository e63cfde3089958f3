"""A server that goes away, forgets, fills up, or whose replies are lost: nothing is done twice, nothing is lost, and
what happens is said in one line."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from tests.integration.conftest import Connect, StartServer, wait_until
from tests.integration.lossy import LossyWire
from tests.samples import completion, request, shard, weights
from tlt_pipeline import messages as m
from tlt_pipeline.bus import Bus, BusError, BusFull, Outgoing, link

ROLLOUT = "rollout"
SCHEDULER = "scheduler"


@pytest.fixture
async def wire(redis_url: str, tmp_path: Path) -> AsyncIterator[LossyWire]:
    async with LossyWire(redis_url, tmp_path) as made:
        yield made


class TestLostReplies:
    """The server has done it, the connection broke before the reply: the bus asks again."""

    async def test_submit_queues_once(self, connect: Connect, wire: LossyWire):
        bus = await connect(url=wire.url)
        await bus.submit(m.REQUESTS, request(0), "warm-up")
        wire.lose = 1
        assert await bus.submit(m.REQUESTS, request(1), "r1") == "queued"
        assert wire.lost == 1
        assert await bus.depth(m.REQUESTS) == 2

    async def test_append_adds_once(self, connect: Connect, wire: LossyWire):
        bus = await connect(url=wire.url)
        await bus.append(m.HIDDEN_STATES, shard())
        wire.lose = 1
        entry_id = await bus.append(m.HIDDEN_STATES, shard())
        assert wire.lost == 1
        found = await bus.read(m.HIDDEN_STATES, SCHEDULER, count=9, block_s=0)
        assert len(found) == 2
        assert found[1].entry_id == entry_id

    async def test_complete_gives_one_result_and_says_so(self, connect: Connect, wire: LossyWire):
        bus = await connect(url=wire.url)
        for number in range(2):
            await bus.submit(m.REQUESTS, request(number), str(number))
        first, second = await bus.read(m.REQUESTS, ROLLOUT, count=2, block_s=0)
        await bus.complete(first, m.COMPLETIONS, completion(request(0)))
        wire.lose = 1
        assert await bus.complete(second, m.COMPLETIONS, completion(request(1))) is True
        assert wire.lost == 1
        assert await bus.depth(m.COMPLETIONS) == 2

    async def test_commit_is_done_once(self, connect: Connect, wire: LossyWire):
        bus = await connect(url=wire.url)
        await bus.commit(state_key="plan", state=b"1")
        wire.lose = 1
        await bus.commit(state_key="plan", state=b"2", appends=[Outgoing(m.HIDDEN_STATES, shard())])
        assert wire.lost == 1
        await bus.commit(state_key="plan", state=b"3")
        assert await bus.load_state("plan") == b"3"
        assert await bus.depth(m.HIDDEN_STATES) == 1

    async def test_broadcast_is_heard_once(self, connect: Connect, wire: LossyWire):
        bus = await connect(url=wire.url)
        await bus.broadcast(m.WEIGHTS, weights(1), "policy")
        wire.lose = 1
        await bus.broadcast(m.WEIGHTS, weights(2), "policy")
        assert wire.lost == 1
        assert [found.version for _, found in await bus.listen(m.WEIGHTS, "0", block_s=0)] == [1, 2]  # type: ignore[union-attr]

    async def test_dead_letter_is_written_once(self, connect: Connect, wire: LossyWire):
        bus = await connect(url=wire.url)
        for number in range(2):
            await bus.submit(m.REQUESTS, request(number), str(number))
        first, second = await bus.read(m.REQUESTS, ROLLOUT, count=2, block_s=0)
        await bus.dead_letter(first, "one")
        wire.lose = 1
        await bus.dead_letter(second, "two")
        assert wire.lost == 1
        assert await bus.depth(m.DEAD_LETTERS) == 2

    async def test_read_brings_back_what_was_on_the_way(self, connect: Connect, wire: LossyWire):
        bus = await connect(url=wire.url)
        for number in range(3):
            await bus.submit(m.REQUESTS, request(number), str(number))
        (first,) = await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        wire.lose = 1
        found = await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        assert wire.lost == 1
        found += await bus.read(m.REQUESTS, ROLLOUT, count=9, block_s=0)
        assert sorted(d.message.index for d in found) == [1, 2]  # type: ignore[union-attr]
        assert [d.attempt for d in (first, *found)] == [1, 1, 1], "nobody has worked on it yet"

    async def test_claim_brings_back_what_was_on_the_way(self, connect: Connect, wire: LossyWire):
        other, bus = await connect("other"), await connect("claimer", url=wire.url, lease_s=0.001)
        for number in range(2):
            await other.submit(m.REQUESTS, request(number), str(number))
        await other.read(m.REQUESTS, ROLLOUT, count=2, block_s=0)
        first = await wait_until(lambda: bus.claim(m.REQUESTS, ROLLOUT, count=1))
        wire.lose = 1
        found = await bus.claim(m.REQUESTS, ROLLOUT, count=1)
        found += await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        assert wire.lost == 1
        assert {d.message.index for d in (*first, *found)} == {0, 1}  # type: ignore[union-attr]

    async def test_cancelled_read_loses_nothing(self, connect: Connect, wire: LossyWire):
        sender, bus = await connect("sender"), await connect(url=wire.url)
        await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        wire.open.clear()
        reading = asyncio.create_task(bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=30))
        await sender.submit(m.REQUESTS, request(0), "r0")
        await wait_until(lambda: is_in_work(sender))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        wire.open.set()
        (found,) = await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        assert (found.message, found.attempt) == (request(0), 1)


async def is_in_work(bus: Bus) -> bool:
    return await bus.depth(m.REQUESTS) == 1 and await bus.depth(m.REQUESTS, ROLLOUT) == 0


class TestServerGone:
    async def test_a_killed_server_that_comes_back_is_waited_for(self, connect: Connect, start_server: StartServer):
        server = start_server()
        bus = await connect(url=server.url)
        await bus.submit(m.REQUESTS, request(0), "r0")
        (delivery,) = await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        with capture_logs() as logs:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            completing = asyncio.create_task(bus.complete(delivery, m.COMPLETIONS, completion(request(0))))
            await wait_until(lambda: [line for line in logs if "does not answer" in line["event"]])
            assert await wait_until(server.revive) is True
            assert server.revive() is False
            assert await completing is True
        events = [line["event"] for line in logs if line["event"].startswith("redis ")]
        assert events.count("redis does not answer, trying again") == 1
        assert events[-1] == "redis answers again"
        assert await bus.depth(m.COMPLETIONS) == 1
        assert await bus.depth(m.REQUESTS) == 0

    async def test_a_server_that_hangs_does_late_what_was_asked_and_does_it_once(
        self, connect: Connect, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(link, "SOCKET_TIMEOUT_S", 0.2)
        server = start_server()
        bus = await connect(url=server.url)
        await bus.append(m.HIDDEN_STATES, shard())
        assert server.pid is not None
        with capture_logs() as logs:
            os.kill(server.pid, signal.SIGSTOP)
            try:
                appending = asyncio.create_task(bus.append(m.HIDDEN_STATES, shard()))
                await wait_until(lambda: [line for line in logs if "does not answer" in line["event"]])
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await appending
        assert await bus.depth(m.HIDDEN_STATES) == 2

    async def test_a_server_that_stays_away_is_one_line_after_a_bounded_wait(
        self, connect: Connect, start_server: StartServer
    ):
        server = start_server()
        bus = await connect(url=server.url, worker_timeout_s=0.1)
        server.close()
        async with asyncio.timeout(10):
            with pytest.raises(BusError, match=r"redis.sock has not answered for 0 s: .* --resume"):
                await bus.append(m.HIDDEN_STATES, shard())

    async def test_a_server_that_forgot_everything_is_set_up_again(
        self, connect: Connect, redis_url: str, raw: redis.Redis
    ):
        bus = await connect()
        await bus.commit(state_key="plan", state=b"old")
        await bus.submit(m.REQUESTS, request(0), "r0")
        (lost,) = await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        raw.flushall()
        with capture_logs() as logs:
            assert await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0) == []
        assert "made again" in logs[0]["event"]
        assert bus.counts["groups_lost"] == 1
        assert await bus.submit(m.REQUESTS, request(0), "r0") == "queued"
        assert await bus.complete(lost, m.COMPLETIONS, completion(request(0))) is False
        (again,) = await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        assert again.message == request(0)
        await bus.commit(state_key="plan", state=b"new", acks=[lost, again])
        assert await bus.load_state("plan") == b"new"
        assert await bus.claim(m.REQUESTS, ROLLOUT, count=1) == []
        assert await bus.recover(m.HIDDEN_STATES, SCHEDULER) == []
        assert await bus.renew([lost]) == [lost]

    async def test_scripts_are_loaded_again(self, connect: Connect, raw: redis.Redis):
        bus = await connect()
        await bus.append(m.HIDDEN_STATES, shard())
        raw.script_flush()
        await bus.append(m.HIDDEN_STATES, shard())
        assert await bus.depth(m.HIDDEN_STATES) == 2


async def test_full_memory_is_one_line_and_ends_when_work_is_done(connect: Connect, start_server: StartServer):
    server = start_server()
    bus = await connect(url=server.url)
    await bus.commit(state_key="plan", state=b"old")
    for number in range(5):
        await bus.submit(m.REQUESTS, request(number, entry="x" * 200_000), str(number))
    taken = await bus.read(m.REQUESTS, ROLLOUT, count=9, block_s=0)
    with redis.Redis.from_url(server.url) as raw:
        raw.config_set("maxmemory", raw.info("memory")["used_memory"] - 300_000)
    with pytest.raises(BusFull, match=r"maxmemory: raise redis.maxmemory_mb"):
        await bus.submit(m.REQUESTS, request(9), "r9")
    with pytest.raises(BusFull):
        await bus.complete(taken[0], m.COMPLETIONS, completion(request(0)))
    with pytest.raises(BusFull):
        await bus.commit(state_key="plan", state=b"new", acks=taken)
    assert await bus.load_state("plan") == b"old"
    assert await bus.depth(m.REQUESTS) == 5, "nothing was evicted, nothing half done"
    assert await bus.renew(taken) == []
    await bus.ack(taken[1:])
    assert await bus.complete(taken[0], m.COMPLETIONS, completion(request(0))) is True
