"""The bus: work queues, broadcasts and the scheduler's outbox, on Redis streams, at least once.

Every operation may be repeated without harm, because that is what happens when a reply is lost: each is one
script, or idempotent by itself. Work queues are never trimmed by length; a full one refuses.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from tlt_pipeline import messages as m
from tlt_pipeline.bus import scripts
from tlt_pipeline.bus.inbox import Inbox, block_option, group_deliveries
from tlt_pipeline.bus.letters import encode_for, entry_body, read_entry
from tlt_pipeline.bus.link import BusError, BusFull, Link
from tlt_pipeline.bus.streams import Delivery, Keys, Outgoing, stream_rule
from tlt_pipeline.config import LimitsConfig

SEEN_TTL_S = 24 * 3600
CALL_TTL_S = 300
BROADCAST_LENGTH = 64


class Bus:
    """One process's access to the streams of one run. `consumer` is stable over restarts: it owns pending
    entries.

    `counts` holds what went on besides plain work: redelivered, dead_letters, lost_leases, groups_lost. Any
    method raises BusError (one line with the remedy) when Redis stays away for 2 ×
    limits.worker_timeout_s."""

    def __init__(self, link: Link, run_id: str, limits: LimitsConfig, consumer: str) -> None:
        self._link = link
        self._keys = Keys(run_id)
        self._limits = limits
        self._tokens: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self._inbox = Inbox(link, self._keys, limits, consumer, self.counts)

    @classmethod
    async def connect(
        cls, url: str, run_id: str, limits: LimitsConfig, consumer: str, *, connect_timeout_s: float = 10.0
    ) -> Bus:
        """Raises RedisUnusable (a BusError and ValueError; one line with the remedy): malformed URL, nobody
        there within `connect_timeout_s`, refused, older than 7.0."""
        patience_s = 2 * limits.worker_timeout_s
        link = await Link.open(url, connect_timeout_s=connect_timeout_s, patience_s=patience_s)
        return cls(link, run_id, limits, consumer)

    async def close(self) -> None:
        await self._link.close()

    # --- sending --------------------------------------------------------------------------------------------

    async def submit(self, stream: str, message: m.Message, dedupe_id: str) -> Literal["queued", "duplicate", "full"]:
        """Adds the message unless `dedupe_id` was submitted within a day or the stream is at
        limits.queue_length."""
        keys = [self._keys.stream(stream), self._keys.seen(stream, dedupe_id)]
        args = [encode_for(stream, message), self._limits.queue_length, SEEN_TTL_S, uuid.uuid4().hex]
        reply: bytes = await self._link.run(scripts.SUBMIT, keys, args)
        return cast(Literal["queued", "duplicate", "full"], reply.decode())

    async def append(self, stream: str, message: m.Message) -> str:
        """Adds the message and returns its entry id. Raises BusFull at limits.queue_length entries."""
        keys = [self._keys.stream(stream), self._keys.call(uuid.uuid4().hex)]
        args = [encode_for(stream, message), self._limits.queue_length, CALL_TTL_S]
        reply: bytes = await self._link.run(scripts.APPEND, keys, args)
        if reply == b"full":
            raise self._full(stream)
        return reply.decode()

    async def broadcast(self, stream: str, message: m.Message, latest: str) -> None:
        """For subscribers (`listen`), the last few kept, and under `latest` for those who come late."""
        keys = [self._keys.stream(stream), self._keys.call(uuid.uuid4().hex), self._keys.latest(latest)]
        await self._link.run(scripts.BROADCAST, keys, [encode_for(stream, message), BROADCAST_LENGTH, CALL_TTL_S])

    # --- receiving work -------------------------------------------------------------------------------------

    async def read(self, stream: str, group: str, *, count: int, block_s: float) -> list[Delivery]:
        """Up to `count` new entries, waiting at most `block_s`; undecodable ones become dead letters. Entries
        whose delivery was lost on the way (a cancelled read, a broken connection) come first."""
        return await self._inbox.read(stream, group, count, block_s)

    async def recover(self, stream: str, group: str) -> list[Delivery]:
        """This consumer's pending entries that it doesn't hold: what a crash under this name left. A new
        attempt each; those over limits.max_attempts become dead letters."""
        return await self._inbox.recover(stream, group)

    async def claim(self, stream: str, group: str, *, count: int) -> list[Delivery]:
        """Up to `count` entries whose consumer has been silent for limits.lease_s. A new attempt each; those
        over limits.max_attempts become dead letters."""
        return await self._inbox.claim(stream, group, count)

    async def renew(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Heartbeat: the entries stay this consumer's for another limits.lease_s. Returns those that no
        longer are (claimed by another, or settled): work on them may stop."""
        return await self._inbox.renew(deliveries)

    async def release(self, deliveries: Iterable[Delivery]) -> None:
        """Gives entries back unworked (a worker that drains): claimable by others at once, the attempt not
        counted."""
        await self._inbox.release(deliveries)

    # --- settling work --------------------------------------------------------------------------------------

    async def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Done with these; an entry goes when every group of its stream is."""
        for (stream, group), batch in group_deliveries(deliveries).items():
            rule = stream_rule(stream)
            for start in range(0, len(batch), 1000):
                ids = [d.entry_id for d in batch[start : start + 1000]]
                args = [group, rule.removal, len(rule.groups), *rule.groups, *ids]
                await self._link.run(scripts.ACK, [self._keys.stream(stream)], args)
            self._inbox.forget(batch)

    async def complete(self, delivery: Delivery, stream: str, result: m.Message) -> bool:
        """Acknowledges the delivery and adds its result to `stream` in one step. False: another worker has
        settled it before, and nothing was added. Raises BusFull with nothing done."""
        rule = stream_rule(delivery.stream)
        call = self._keys.call(uuid.uuid4().hex)
        keys = [self._keys.stream(delivery.stream), self._keys.stream(stream), call]
        args = [delivery.group, delivery.entry_id, rule.removal, encode_for(stream, result)]
        reply: bytes = await self._link.run(
            scripts.COMPLETE, keys, [*args, self._limits.queue_length, CALL_TTL_S, *rule.groups]
        )
        if reply == b"full":
            raise self._full(stream)
        self._inbox.forget([delivery])
        return reply == b"done"

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Gives the delivery up: acknowledged, and kept in `dead_letters` with the reason."""
        await self._inbox.bury(
            delivery.stream, delivery.group, delivery.entry_id, delivery.body, delivery.attempt, reason
        )

    async def commit(
        self,
        *,
        state_key: str,
        state: bytes,
        acks: Sequence[Delivery] = (),
        appends: Sequence[Outgoing] = (),
        remove: Sequence[tuple[str, str]] = (),
    ) -> None:
        """The outbox, in one step: saves `state`, acknowledges `acks`, adds `appends` (those with a dedupe_id
        seen before are skipped) and forgets the (stream, dedupe id) pairs of `remove`. With nothing done it
        raises BusFull, or BusError where another process has committed under `state_key` since this one
        loaded it."""
        plan, keys = self._plan(state_key, acks, appends, remove)
        token = uuid.uuid4().hex
        packed = cast(bytes, msgpack.packb(plan, use_bin_type=False))  # pyright: ignore[reportUnknownMemberType]
        args = [token, self._tokens.get(state_key, ""), state, packed]
        reply = cast(bytes, await self._link.run(scripts.COMMIT, keys, args)).decode()
        if reply == "fenced":
            raise BusError(f"another process keeps the {state_key} state of this run now: stop one of the two")
        if reply.startswith("full "):
            raise self._full(reply.removeprefix(f"full {self._keys.stream('')}"))
        self._tokens[state_key] = token
        self._inbox.forget(acks)

    async def load_state(self, state_key: str) -> bytes | None:
        """What the last commit saved; None before the first."""
        names = (self._keys.state(state_key), self._keys.token(state_key))
        state, token = cast(list[bytes | None], await self._link.call("MGET", *names))
        self._tokens[state_key] = token.decode() if token else ""
        return state

    # --- broadcasts, versions, lengths ----------------------------------------------------------------------

    async def latest(self, name: str) -> m.AnyMessage | None:
        """The last message broadcast under this name. Raises InvalidMessage if it is none of ours."""
        body = cast(bytes | None, await self._link.call("GET", self._keys.latest(name)))
        return None if body is None else m.decode(body)

    async def listen(self, stream: str, after: str, *, block_s: float) -> list[tuple[str, m.AnyMessage]]:
        """Entries after the id `after` ("0": all that are kept), waiting at most `block_s`. For subscribers:
        nothing is acknowledged, and each passes the last id it got. Undecodable entries become dead letters,
        once."""
        deadline = time.monotonic() + block_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            command = (
                "XREAD",
                "COUNT",
                100,
                *block_option(left_s),
                "STREAMS",
                self._keys.stream(stream),
                after,
            )
            reply: Any = await self._link.call(*command)
            heard: list[tuple[str, m.AnyMessage]] = []
            entries: list[Any] = reply[0][1] if reply else []
            for raw_id, fields in entries:
                after = cast(bytes, raw_id).decode()
                message, reason = read_entry(stream, fields)
                if message is None:
                    await self._inbox.bury(stream, "", after, entry_body(fields), 0, reason)
                else:
                    heard.append((after, message))
            if heard or time.monotonic() >= deadline:
                return heard

    async def next_version(self, model: str, *, above: int = 0) -> int:
        """A version number of `model` never given before, and greater than `above` (say, the newest on
        disk)."""
        return int(await self._link.run(scripts.NEXT_VERSION, [self._keys.version(model)], [above]))

    async def depth(self, stream: str, group: str | None = None) -> int:
        """Entries in the stream; with `group`, those not yet delivered to it."""
        if group is None:
            return int(await self._link.call("XLEN", self._keys.stream(stream)))
        return int(await self._link.run(scripts.WAITING, [self._keys.stream(stream)], [group]))

    # --- parts ----------------------------------------------------------------------------------------------

    def _full(self, stream: str) -> BusFull:
        return BusFull(
            f"{stream} holds limits.queue_length ({self._limits.queue_length}) entries: see whether its "
            "reader still runs, or raise limits.queue_length"
        )

    def _plan(
        self,
        state_key: str,
        acks: Sequence[Delivery],
        appends: Sequence[Outgoing],
        remove: Sequence[tuple[str, str]],
    ) -> tuple[dict[str, Any], list[str]]:
        """What scripts.COMMIT takes: keys are named by their place, from 1."""
        keys = [self._keys.state(state_key), self._keys.token(state_key)]

        def place(key: str) -> int:
            keys.append(key)
            return len(keys)

        settled: list[Any] = []
        for (stream, group), batch in group_deliveries(acks).items():
            rule = stream_rule(stream)
            ids = [d.entry_id for d in batch]
            settled.append([place(self._keys.stream(stream)), group, rule.removal, list(rule.groups), ids])
        added: list[Any] = []
        for item in appends:
            seen = 0 if item.dedupe_id is None else place(self._keys.seen(item.stream, item.dedupe_id))
            added.append([place(self._keys.stream(item.stream)), encode_for(item.stream, item.message), seen])
        forgotten = [place(self._keys.seen(stream, dedupe_id)) for stream, dedupe_id in remove]
        bound, ttl = self._limits.queue_length, SEEN_TTL_S
        return {"acks": settled, "adds": added, "forget": forgotten, "bound": bound, "ttl": ttl}, keys
