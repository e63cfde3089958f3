"""What becomes of work and news: given up with a reason, kept until all have it, committed in one step, broadcast."""

from __future__ import annotations

import pytest
import redis
from structlog.testing import capture_logs

from tests.integration.conftest import Connect, wait_until
from tests.integration.work import ROLLOUT, SCHEDULER, dead_letters, ids, result_of, submit, take
from tests.samples import completion, request, shard, weights
from tlt_pipeline import messages as m
from tlt_pipeline.bus import Bus, BusError, BusFull, Outgoing


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
        for version in range(250):
            await bus.broadcast(m.WEIGHTS, weights(version), "policy")
        assert await bus.depth(m.WEIGHTS) < 200
        kept = await bus.listen(m.WEIGHTS, "0", block_s=0)
        heard = await bus.listen(m.WEIGHTS, kept[-1][0], block_s=0) or kept
        assert heard[-1][1] == weights(249)
        assert await bus.latest("policy") == weights(249)

    async def test_versions_only_grow(self, connect: Connect):
        first, second = await connect("a"), await connect("b")
        assert [await bus.next_version("drafter") for bus in (first, second, first)] == [1, 2, 3]
        assert await first.next_version("drafter", above=10) == 11
        assert await second.next_version("drafter", above=5) == 12
