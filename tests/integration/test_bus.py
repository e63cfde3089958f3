"""Work on a real server: each request once, whatever happens to those who work on it."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest
import redis

from tests.integration.conftest import Connect, wait_until
from tests.integration.work import ROLLOUT, SCHEDULER, dead_letters, ids, result_of, submit, take
from tests.samples import request, shard
from tlt_pipeline import messages as m
from tlt_pipeline.bus import BusFull, Delivery, Outgoing


class TestSubmit:
    async def test_duplicates_are_known(self, connect: Connect):
        bus = await connect()
        assert await bus.submit(m.REQUESTS, request(1), "a") == "queued"
        assert await bus.submit(m.REQUESTS, request(1), "a") == "duplicate"
        assert await bus.submit(m.REQUESTS, request(2), "b") == "queued"
        assert await bus.depth(m.REQUESTS) == 2

    async def test_a_full_queue_refuses_and_drops_nothing(self, connect: Connect):
        bus = await connect(queue_length=3)
        await submit(bus, 3)
        assert await bus.submit(m.REQUESTS, request(9), "r9") == "full"
        with pytest.raises(BusFull, match=r"rollout.requests .* raise limits.queue_length"):
            await bus.append(m.REQUESTS, request(9))
        done, *_ = await take(bus)
        assert await bus.submit(m.REQUESTS, request(9), "r9") == "full", "in work still counts"
        await bus.complete(done, m.COMPLETIONS, result_of(done))
        assert await bus.submit(m.REQUESTS, request(9), "r9") == "queued"

    async def test_full_results_hold_the_request_back(self, connect: Connect):
        bus = await connect(queue_length=1)
        await submit(bus, 1)
        first = (await take(bus))[0]
        await bus.complete(first, m.COMPLETIONS, result_of(first))
        await bus.submit(m.REQUESTS, request(1), "again")
        second = (await take(bus))[0]
        with pytest.raises(BusFull, match=r"rollout.completions"):
            await bus.complete(second, m.COMPLETIONS, result_of(second))
        for group in (SCHEDULER, "learner"):
            await bus.ack(await bus.read(m.COMPLETIONS, group, count=1, block_s=0))
        assert await bus.complete(second, m.COMPLETIONS, result_of(second))

    async def test_a_message_on_the_wrong_stream_is_refused(self, connect: Connect):
        bus = await connect()
        with pytest.raises(ValueError, match=r"Shutdown does not belong on rollout.requests"):
            await bus.append(m.REQUESTS, m.Shutdown(reason="x"))


class TestDelivery:
    async def test_each_entry_goes_to_one_reader_in_order(self, connect: Connect):
        first, second = await connect("first"), await connect("second")
        requests = await submit(first, 6)
        taken = await take(first, 3) + await take(second, 3)
        assert [delivery.message for delivery in taken] == requests
        assert [delivery.attempt for delivery in taken] == [1] * 6
        assert taken[0].body == m.encode(requests[0])
        assert await second.read(m.REQUESTS, ROLLOUT, count=9, block_s=0) == []

    async def test_depth_tells_waiting_from_in_work(self, connect: Connect):
        bus = await connect()
        assert await bus.depth(m.REQUESTS) == await bus.depth(m.REQUESTS, ROLLOUT) == 0
        await submit(bus, 5)
        assert await bus.depth(m.REQUESTS, ROLLOUT) == 5
        taken = await take(bus, 2)
        assert (await bus.depth(m.REQUESTS), await bus.depth(m.REQUESTS, ROLLOUT)) == (5, 3)
        await bus.ack(taken)
        assert (await bus.depth(m.REQUESTS), await bus.depth(m.REQUESTS, ROLLOUT)) == (3, 3)

    async def test_work_of_a_killed_process_is_given_to_another(self, connect: Connect, redis_url: str):
        bus = await connect("other", lease_s=0.2)
        (sent,) = await submit(bus, 1)
        run_id = bus._keys.run_id
        program = (
            "import asyncio\nfrom tlt_pipeline.bus import Bus\nfrom tlt_pipeline.config import LimitsConfig\n"
            "async def main():\n"
            f"    bus = await Bus.connect({redis_url!r}, {run_id!r}, LimitsConfig(), 'victim')\n"
            "    await bus.read('rollout.requests', 'rollout', count=1, block_s=5)\n"
            "    print('has it', flush=True)\n"
            "    await asyncio.Event().wait()\n"
            "asyncio.run(main())\n"
        )
        victim = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        assert victim.stdout is not None
        assert (await victim.stdout.readline()).strip() == b"has it"
        victim.kill()
        await victim.wait()
        (claimed,) = await wait_until(lambda: bus.claim(m.REQUESTS, ROLLOUT, count=5))
        assert (claimed.message, claimed.attempt) == (sent, 2)
        assert bus.counts["redelivered"] == 1
        assert await bus.complete(claimed, m.COMPLETIONS, result_of(claimed))

    async def test_a_lease_that_is_renewed_is_not_claimed(self, connect: Connect, raw: redis.Redis):
        worker, other = await connect("worker"), await connect("other", lease_s=0.1)
        await submit(worker, 2)
        taken = await take(worker, 2)
        key = worker._keys.stream(m.REQUESTS)

        def idle_ms() -> list[int]:
            pending = raw.xpending_range(key, ROLLOUT, "-", "+", 10)
            return [entry["time_since_delivered"] for entry in pending]

        await wait_until(lambda: min(idle_ms()) >= 100)
        assert await worker.renew(taken) == []
        assert max(idle_ms()) < 100
        assert await other.claim(m.REQUESTS, ROLLOUT, count=5) == []
        counted = [entry["times_delivered"] for entry in raw.xpending_range(key, ROLLOUT, "-", "+", 10)]
        assert counted == [1, 1], "a heartbeat is no attempt"
        await wait_until(lambda: min(idle_ms()) >= 100)
        assert ids(await other.claim(m.REQUESTS, ROLLOUT, count=5)) == ids(taken)

    async def test_a_worker_too_busy_to_renew_is_not_given_its_own_work_again(self, connect: Connect):
        bus, other = await connect("busy", lease_s=0.01), await connect("other", lease_s=0.01)
        await submit(bus, 3)
        taken = await take(bus, 3)
        (claimed,) = await wait_until(lambda: other.claim(m.REQUESTS, ROLLOUT, count=1))
        assert await bus.claim(m.REQUESTS, ROLLOUT, count=9) == []
        assert ids(await bus.renew(taken)) == ids([claimed])
        again = await wait_until(lambda: bus.claim(m.REQUESTS, ROLLOUT, count=9))
        assert (ids(again), again[0].attempt) == (ids([claimed]), 3), "lost to another, so it may come back"

    async def test_renewing_tells_what_was_lost_and_takes_nothing_back(self, connect: Connect):
        slow, quick = await connect("slow"), await connect("quick", lease_s=0.01)
        await submit(slow, 2)
        taken = await take(slow, 2)
        (claimed,) = await wait_until(lambda: quick.claim(m.REQUESTS, ROLLOUT, count=1))
        lost = await slow.renew(taken)
        assert ids(lost) == ids([claimed])
        assert slow.counts["lost_leases"] == 1
        assert await quick.renew([claimed]) == []

    async def test_two_workers_that_finish_one_request_give_one_result(self, connect: Connect):
        slow, quick = await connect("slow"), await connect("quick", lease_s=0.01)
        await submit(slow, 1)
        (first,) = await take(slow)
        (second,) = await wait_until(lambda: quick.claim(m.REQUESTS, ROLLOUT, count=1))
        assert await quick.complete(second, m.COMPLETIONS, result_of(second)) is True
        assert await slow.complete(first, m.COMPLETIONS, result_of(first)) is False
        assert await slow.complete(first, m.COMPLETIONS, result_of(first)) is False
        found = await slow.read(m.COMPLETIONS, SCHEDULER, count=9, block_s=0)
        assert [delivery.message for delivery in found] == [result_of(second)]
        assert await slow.depth(m.REQUESTS) == 0

    async def test_a_restarted_worker_finds_its_work_again(self, connect: Connect):
        await submit(await connect("scheduler"), 3)
        before = await connect("rollout-0")
        taken = await take(before, 2)
        await before.close()
        after = await connect("rollout-0")
        found = await after.recover(m.REQUESTS, ROLLOUT)
        assert ids(found) == ids(taken)
        assert [delivery.attempt for delivery in found] == [2, 2]
        assert await after.recover(m.REQUESTS, ROLLOUT) == [], "what it holds is not given twice"
        assert len(await take(after)) == 1

    async def test_much_work_is_found_again(self, connect: Connect):
        before = await connect("scheduler")
        shards = [shard().model_copy(update={"shard_id": str(number)}) for number in range(1200)]
        await before.commit(state_key="plan", state=b"", appends=[Outgoing(m.HIDDEN_STATES, item) for item in shards])
        assert len(await before.read(m.HIDDEN_STATES, SCHEDULER, count=5000, block_s=0)) == 1200
        found = await (await connect("scheduler")).recover(m.HIDDEN_STATES, SCHEDULER)
        assert [delivery.message for delivery in found] == shards

    async def test_released_work_is_taken_at_once_and_not_counted(self, connect: Connect):
        first, second = await connect("first", lease_s=60), await connect("second", lease_s=60)
        await submit(first, 2)
        taken = await take(first, 2)
        await first.release(taken[:1])
        found = await second.claim(m.REQUESTS, ROLLOUT, count=5)
        assert ids(found) == ids(taken[:1])
        assert found[0].attempt == 1
        await first.release(found)
        assert await first.claim(m.REQUESTS, ROLLOUT, count=5) == [], "only the owner gives back"


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_ends_once_whatever_the_workers_do(connect: Connect, seed: int):
    """Workers that crash, restart, stall, drain and race at random: each request ends as one completion or as one
    dead letter."""
    chance = random.Random(seed)
    limits = {"lease_s": 0.001, "max_attempts": 4}
    scheduler = await connect("scheduler", **limits)
    requests = await submit(scheduler, 60)
    names = ["w0", "w1", "w2"]
    workers = {name: await connect(name, **limits) for name in names}
    held: dict[str, list[Delivery]] = {name: [] for name in names}
    while await scheduler.depth(m.REQUESTS):
        name = chance.choice(names)
        bus, mine = workers[name], held[name]
        action = chance.choice(["read", "claim", "finish", "finish", "crash", "renew", "release"])
        if action == "read":
            mine += await bus.read(m.REQUESTS, ROLLOUT, count=3, block_s=0)
        elif action == "claim":
            mine += await bus.claim(m.REQUESTS, ROLLOUT, count=3)
        elif action == "finish" and mine:
            delivery = mine.pop(chance.randrange(len(mine)))
            await bus.complete(delivery, m.COMPLETIONS, result_of(delivery))
        elif action == "crash" and chance.random() < 0.3:
            await bus.close()
            workers[name] = await connect(name, **limits)
            held[name] = await workers[name].recover(m.REQUESTS, ROLLOUT)
        elif action == "renew":
            lost = await bus.renew(mine)
            held[name] = [delivery for delivery in mine if delivery not in lost]
        elif action == "release":
            await bus.release(mine)
            held[name] = []
    finished = ids(await scheduler.read(m.COMPLETIONS, SCHEDULER, count=1000, block_s=0))
    dead = [letter.request_id for letter in await dead_letters(scheduler)]
    assert sorted([*finished, *dead]) == sorted(item.request_id for item in requests)  # type: ignore[type-var]
    assert len(finished) > 20
