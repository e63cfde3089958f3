"""Work on a real server: each request once, whatever happens to those who work on it."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest
import redis
from structlog.testing import capture_logs

from tests.integration.conftest import Connect, wait_until
from tests.samples import completion, request, shard, weights
from tlt_pipeline import messages as m
from tlt_pipeline.bus import Bus, BusError, BusFull, Delivery, Outgoing

ROLLOUT = "rollout"
SCHEDULER = "scheduler"


async def submit(bus: Bus, count: int) -> list[m.RolloutRequest]:
    requests = [request(number) for number in range(count)]
    for item in requests:
        assert await bus.submit(m.REQUESTS, item, item.request_id) == "queued"
    return requests


async def take(bus: Bus, count: int = 1) -> list[Delivery]:
    """Exactly `count` requests."""
    taken: list[Delivery] = []
    while len(taken) < count:
        found = await bus.read(m.REQUESTS, ROLLOUT, count=count - len(taken), block_s=5)
        assert found
        taken += found
    return taken


def result_of(delivery: Delivery) -> m.Completion:
    assert isinstance(delivery.message, m.RolloutRequest)
    return completion(delivery.message, attempt=delivery.attempt)


def ids(deliveries: list[Delivery]) -> list[str]:
    return [getattr(delivery.message, "request_id", "") for delivery in deliveries]


async def dead_letters(bus: Bus) -> list[m.DeadLetter]:
    found = await bus.read(m.DEAD_LETTERS, SCHEDULER, count=1000, block_s=0)
    return [delivery.message for delivery in found if isinstance(delivery.message, m.DeadLetter)]


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
        for number in range(1200):
            await before.append(m.HIDDEN_STATES, shard().model_copy(update={"shard_id": str(number)}))
        assert len(await before.read(m.HIDDEN_STATES, SCHEDULER, count=5000, block_s=0)) == 1200
        found = await (await connect("scheduler")).recover(m.HIDDEN_STATES, SCHEDULER)
        assert [d.message.shard_id for d in found] == [str(number) for number in range(1200)]  # type: ignore[union-attr]

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


class TestDeadLetters:
    async def test_work_that_kills_its_workers_is_given_up(self, connect: Connect):
        await submit(await connect("scheduler"), 1)
        (delivery,) = await take(await connect("rollout-0", max_attempts=3))
        for attempt in (2, 3):
            (delivery,) = await (await connect("rollout-0")).recover(m.REQUESTS, ROLLOUT)
            assert delivery.attempt == attempt
        last = await connect("rollout-0")
        with capture_logs() as logs:
            assert await last.recover(m.REQUESTS, ROLLOUT) == []
        (letter,) = await dead_letters(last)
        assert letter.request_id == request(0).request_id
        assert letter.attempts == 3
        assert "3 attempts" in letter.reason
        assert m.decode(letter.body) == request(0)
        assert [(line["event"], line["request_id"]) for line in logs] == [("dead letter", letter.request_id)]
        assert await last.depth(m.REQUESTS) == 0
        assert last.counts["dead_letters"] == 1

    async def test_given_up_work_does_not_hide_the_rest(self, connect: Connect):
        bus, other = await connect("first", lease_s=0.01, max_attempts=1), await connect("other")
        await submit(bus, 3)
        await take(other, 2)
        await wait_until(lambda: dead_pair(bus))
        assert ids(await bus.read(m.REQUESTS, ROLLOUT, count=5, block_s=0)) == [request(2).request_id]

    async def test_results_are_never_given_up(self, connect: Connect):
        bus = await connect("scheduler", max_attempts=1)
        await bus.append(m.COMPLETIONS, completion(request()))
        await bus.read(m.COMPLETIONS, SCHEDULER, count=1, block_s=0)
        for attempt in (2, 3, 4):
            (found,) = await (await connect("scheduler", max_attempts=1)).recover(m.COMPLETIONS, SCHEDULER)
            assert found.attempt == attempt

    async def test_the_reason_is_kept(self, connect: Connect):
        bus = await connect()
        await submit(bus, 1)
        (delivery,) = await take(bus)
        await bus.dead_letter(delivery, "prompt longer than the context")
        await bus.dead_letter(delivery, "said twice")
        assert [letter.reason for letter in await dead_letters(bus)] == ["prompt longer than the context"]
        assert await bus.complete(delivery, m.COMPLETIONS, result_of(delivery)) is False

    @pytest.mark.parametrize(
        ("body", "reason", "request_id"),
        [
            (b"\xc1 no msgpack", "undecodable", None),
            (m.encode(request(5))[:-3], "undecodable", None),
            (m.encode(m.Shutdown(reason="x")), "does not belong", None),
            (b"\x82\xa4kind\xa1x\xaarequest_id\xa2r7", "undecodable", "r7"),
            (bytes(m.MAX_MESSAGE_BYTES + 1), "undecodable", None),
        ],
        ids=["garbage", "cut", "wrong-kind", "has-id", "huge"],
    )
    async def test_undecodable_entries_are_put_aside(
        self, connect: Connect, raw: redis.Redis, body: bytes, reason: str, request_id: str | None
    ):
        bus = await connect()
        raw.xadd(bus._keys.stream(m.REQUESTS), {"b": body})
        await submit(bus, 1)
        found = await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0)
        assert ids(found) == [request(0).request_id], "the good one behind it is read at once"
        (letter,) = await dead_letters(bus)
        assert reason in letter.reason
        assert letter.request_id == request_id
        assert body.startswith(letter.body)
        assert await bus.depth(m.REQUESTS) == 1

    async def test_an_entry_without_our_field_is_put_aside(self, connect: Connect, raw: redis.Redis):
        bus = await connect()
        raw.xadd(bus._keys.stream(m.REQUESTS), {"other": "x"})
        assert await bus.read(m.REQUESTS, ROLLOUT, count=1, block_s=0) == []
        assert "no field" in (await dead_letters(bus))[0].reason

    async def test_two_groups_put_one_bad_entry_aside_once(self, connect: Connect, raw: redis.Redis):
        bus = await connect()
        raw.xadd(bus._keys.stream(m.COMPLETIONS), {"b": b"\xc1"})
        for group in (SCHEDULER, "learner"):
            assert await bus.read(m.COMPLETIONS, group, count=1, block_s=0) == []
        assert len(await dead_letters(bus)) == 1
        assert await bus.depth(m.COMPLETIONS) == 0


async def dead_pair(bus: Bus) -> bool:
    """Claims (and with max_attempts=1 gives up) what is abandoned; true once two are dead."""
    assert await bus.claim(m.REQUESTS, ROLLOUT, count=1) == []
    return bus.counts["dead_letters"] == 2


class TestTwoGroups:
    async def test_an_entry_stays_until_both_are_done_with_it(self, connect: Connect):
        bus = await connect()
        for number in range(3):
            await bus.append(m.COMPLETIONS, completion(request(number)))
        scheduler = await bus.read(m.COMPLETIONS, SCHEDULER, count=9, block_s=0)
        await bus.ack(scheduler)
        assert await bus.depth(m.COMPLETIONS) == 3, "the learner's group isn't even made"
        learner = await bus.read(m.COMPLETIONS, "learner", count=9, block_s=0)
        assert [d.message for d in learner] == [d.message for d in scheduler]
        await bus.ack(learner[1:])
        assert await bus.depth(m.COMPLETIONS) == 3, "the oldest is still owed"
        await bus.ack(learner[:1])
        assert await bus.depth(m.COMPLETIONS) == 0
        await bus.append(m.COMPLETIONS, completion(request(9)))
        assert len(await bus.read(m.COMPLETIONS, "learner", count=9, block_s=0)) == 1
        assert await bus.depth(m.COMPLETIONS, SCHEDULER) == 1


class TestCommit:
    async def test_state_acks_and_appends_are_one_step(self, connect: Connect):
        bus = await connect("scheduler")
        assert await bus.load_state("plan") is None
        await bus.append(m.COMPLETIONS, completion(request()))
        taken = await bus.read(m.COMPLETIONS, SCHEDULER, count=1, block_s=0)
        out = [Outgoing(m.REQUESTS, request(n), f"r{n}") for n in range(3)]
        command = Outgoing(m.slot_commands(0, "rollout"), m.LeaseGranted(slot=0, holder="rollout", lease=1))
        await bus.commit(state_key="plan", state=b"\x00\xffone", acks=taken, appends=[*out, command])
        await bus.commit(state_key="plan", state=b"two", appends=[*out, Outgoing(m.REQUESTS, request(3), "r3")])
        again = await connect("scheduler")
        assert await again.load_state("plan") == b"two"
        assert await again.recover(m.COMPLETIONS, SCHEDULER) == []
        assert ids(await take(again, 4)) == [request(n).request_id for n in range(4)]
        (granted,) = await again.read(command.stream, "worker", count=5, block_s=0)
        assert granted.message == command.message

    async def test_forgotten_ids_can_be_submitted_again(self, connect: Connect):
        bus = await connect("scheduler")
        await bus.submit(m.REQUESTS, request(0), "r0")
        await bus.commit(state_key="plan", state=b"", remove=[(m.REQUESTS, "r0")])
        assert await bus.submit(m.REQUESTS, request(0), "r0") == "queued"

    async def test_with_a_full_stream_nothing_is_done(self, connect: Connect):
        bus = await connect("scheduler", queue_length=3)
        await bus.commit(state_key="plan", state=b"old")
        await submit(bus, 2)
        await bus.append(m.COMPLETIONS, completion(request()))
        taken = await bus.read(m.COMPLETIONS, SCHEDULER, count=1, block_s=0)
        out = [Outgoing(m.REQUESTS, request(n), f"r{n}") for n in (7, 8)]
        events = [Outgoing(m.HIDDEN_STATES, shard())]
        with pytest.raises(BusFull, match=r"^rollout.requests holds"):
            await bus.commit(state_key="plan", state=b"new", acks=taken, appends=[*events, *out])
        assert await bus.load_state("plan") == b"old"
        assert await bus.depth(m.REQUESTS) == 2
        assert await bus.depth(m.HIDDEN_STATES) == 0
        assert len(await (await connect("scheduler")).recover(m.COMPLETIONS, SCHEDULER)) == 1

    async def test_a_second_keeper_of_the_state_is_told(self, connect: Connect):
        old, new = await connect("scheduler"), await connect("scheduler")
        await old.commit(state_key="plan", state=b"1")
        assert await new.load_state("plan") == b"1"
        await new.commit(state_key="plan", state=b"2")
        with pytest.raises(BusError, match="stop one of the two"):
            await old.commit(state_key="plan", state=b"3", appends=[Outgoing(m.REQUESTS, request(0))])
        assert await new.load_state("plan") == b"2"
        assert await new.depth(m.REQUESTS) == 0


class TestBroadcast:
    async def test_subscribers_hear_all_and_latecomers_the_latest(self, connect: Connect):
        bus = await connect()
        assert await bus.latest("policy") is None
        for version in (1, 2):
            await bus.broadcast(m.WEIGHTS, weights(version), "policy")
        await bus.broadcast(m.WEIGHTS, weights(1, "drafter"), "drafter")
        heard = await bus.listen(m.WEIGHTS, "0", block_s=0)
        assert [message for _, message in heard] == [weights(1), weights(2), weights(1, "drafter")]
        assert await bus.listen(m.WEIGHTS, heard[1][0], block_s=0) == heard[2:]
        assert await bus.listen(m.WEIGHTS, heard[2][0], block_s=0.05) == []
        assert await bus.latest("policy") == weights(2)
        assert await bus.latest("drafter") == weights(1, "drafter")

    async def test_what_is_no_message_is_put_aside_once_for_all(self, connect: Connect, raw: redis.Redis):
        bus, other = await connect("a"), await connect("b")
        raw.xadd(bus._keys.stream(m.WEIGHTS), {"b": b"\xc1"})
        for subscriber in (bus, other, bus):
            assert await subscriber.listen(m.WEIGHTS, "0", block_s=0) == []
        assert len(await dead_letters(bus)) == 1

    async def test_old_broadcasts_go(self, connect: Connect, raw: redis.Redis):
        bus = await connect()
        for version in range(500):
            await bus.broadcast(m.WEIGHTS, weights(version), "policy")
        assert await bus.depth(m.WEIGHTS) < 300
        kept = await bus.listen(m.WEIGHTS, "0", block_s=0)
        heard = await bus.listen(m.WEIGHTS, kept[-1][0], block_s=0) or kept
        assert heard[-1][1] == weights(499)
        assert await bus.latest("policy") == weights(499)

    async def test_versions_only_grow(self, connect: Connect):
        first, second = await connect("a"), await connect("b")
        assert [await bus.next_version("drafter") for bus in (first, second, first)] == [1, 2, 3]
        assert await first.next_version("drafter", above=10) == 11
        assert await second.next_version("drafter", above=5) == 12


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
