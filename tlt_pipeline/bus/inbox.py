"""The receiving half of the bus: entries become deliveries, deliveries are kept, given back or given up.

Redis counts a delivery when it hands an entry out, so an attempt is counted before its work starts. `held`
are the entries that this process knows it has; after a cancelled read or a broken connection the server may
have handed out more than arrived, and the next read brings those back first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import structlog

from tlt_pipeline import messages as m
from tlt_pipeline.bus import scripts
from tlt_pipeline.bus.letters import encode_for, entry_body, letter_for, read_entry
from tlt_pipeline.bus.link import BusError, Link, MissingGroup
from tlt_pipeline.bus.streams import Delivery, Keys, stream_rule
from tlt_pipeline.config import LimitsConfig

BLOCK_S = 2.0
"""One blocking command waits at most so long; a longer wait is several."""
MARKER_TTL_S = 24 * 3600
RECLAIM_PAGE = 500

Entry = list[Any]
"""[id, [field, value, …], attempt] as the scripts give it."""
Pair = tuple[str, str]
"""(stream, group)"""

_log = structlog.get_logger("tlt.bus")


def group_deliveries(deliveries: Iterable[Delivery]) -> dict[Pair, list[Delivery]]:
    """By (stream, group), order kept."""
    grouped: dict[Pair, list[Delivery]] = {}
    for delivery in deliveries:
        grouped.setdefault((delivery.stream, delivery.group), []).append(delivery)
    return grouped


def block_option(seconds: float) -> tuple[str | int, ...]:
    """BLOCK for that long. No option at all for 0: BLOCK 0 would wait for ever."""
    milliseconds = int(min(seconds, BLOCK_S) * 1000)
    return ("BLOCK", milliseconds) if milliseconds > 0 else ()


class Inbox:
    """Reads for one consumer. The public meaning of each method is on `Bus`."""

    def __init__(self, link: Link, keys: Keys, limits: LimitsConfig, consumer: str, counts: Counter[str]) -> None:
        self._link = link
        self._keys = keys
        self._limits = limits
        self._consumer = consumer
        self._counts = counts
        self._held: dict[Pair, set[str]] = {}
        self._unsure: set[Pair] = set()
        self._locks: defaultdict[Pair, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def read(self, stream: str, group: str, count: int, block_s: float) -> list[Delivery]:
        pair = (stream, group)
        deadline = time.monotonic() + block_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)

            async def fetch(left_s: float = left_s) -> list[Entry]:
                return await self._stranded(pair) or await self._fresh(pair, count, left_s)

            found = await self._take(pair, fetch)
            deliveries = await self._deliver(pair, found)
            if deliveries or (not found and time.monotonic() >= deadline):
                return deliveries

    async def recover(self, stream: str, group: str) -> list[Delivery]:
        pair = (stream, group)
        found = await self._take(pair, lambda: self._reclaim(pair, counted=True))
        return await self._deliver(pair, found)

    async def claim(self, stream: str, group: str, count: int) -> list[Delivery]:
        pair = (stream, group)

        async def fetch() -> list[Entry]:
            args = [group, self._consumer, int(self._limits.lease_s * 1000), count, *self._held.get(pair, ())]
            keys = [self._keys.stream(stream)]
            return await self._stranded(pair) or await self._guarded(
                pair, lambda: self._link.run(scripts.CLAIM, keys, args)
            )

        while found := await self._take(pair, fetch):
            if deliveries := await self._deliver(pair, found):
                return deliveries
        return []

    async def renew(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        lost: list[Delivery] = []
        for (stream, group), batch in group_deliveries(deliveries).items():
            args = [group, self._consumer, *(d.entry_id for d in batch)]
            reply: list[bytes] = await self._link.run(scripts.RENEW, [self._keys.stream(stream)], args)
            kept = {entry_id.decode() for entry_id in reply}
            lost += [d for d in batch if d.entry_id not in kept]
        self.forget(lost)
        self._counts["lost_leases"] += len(lost)
        return lost

    async def release(self, deliveries: Iterable[Delivery]) -> None:
        for (stream, group), batch in group_deliveries(deliveries).items():
            args: list[str | int] = [group, self._consumer, int(self._limits.lease_s * 1000) + 1]
            for delivery in batch:
                args += [delivery.entry_id, delivery.attempt - 1]
            await self._link.run(scripts.RELEASE, [self._keys.stream(stream)], args)
            self.forget(batch)

    async def bury(self, stream: str, group: str, entry_id: str, body: bytes, attempts: int, reason: str) -> None:
        """To `dead_letters`; `group` empty where a plain reader found it, which has nothing to
        acknowledge."""
        letter = letter_for(stream, entry_id, body, attempts, reason)
        rule = stream_rule(stream)
        keys = [
            self._keys.stream(stream),
            self._keys.stream(m.DEAD_LETTERS),
            self._keys.buried(stream, entry_id),
        ]
        args = [group, entry_id, rule.removal, encode_for(m.DEAD_LETTERS, letter), self._limits.queue_length]
        first: int = await self._link.run(scripts.BURY, keys, [*args, MARKER_TTL_S, *rule.groups])
        self._held.get((stream, group), set()).discard(entry_id)
        if first:
            self._counts["dead_letters"] += 1
            _log.warning(
                "dead letter",
                stream=stream,
                entry_id=entry_id,
                request_id=letter.request_id,
                attempts=attempts,
                reason=letter.reason,
            )

    def forget(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._held.get((delivery.stream, delivery.group), set()).discard(delivery.entry_id)

    # --- fetching entries -----------------------------------------------------------------------------------

    async def _take(self, pair: Pair, fetch: Callable[[], Awaitable[list[Entry]]]) -> list[Entry]:
        """What `fetch` gives, held from now on. One at a time a pair: what one has fetched is no stranded
        entry to another."""
        async with self._locks[pair]:
            found = await fetch()
            self._held.setdefault(pair, set()).update(_id_of(entry) for entry in found)
            return found

    async def _fresh(self, pair: Pair, count: int, block_s: float) -> list[Entry]:
        stream, group = pair
        options = ("GROUP", group, self._consumer, "COUNT", count, *block_option(block_s))
        place = ("STREAMS", self._keys.stream(stream), ">")
        reply = await self._guarded(pair, lambda: self._link.call("XREADGROUP", *options, *place))
        return [[entry_id, fields, 1] for entry_id, fields in reply[0][1]] if reply else []

    async def _stranded(self, pair: Pair) -> list[Entry]:
        """Entries handed out by the server that never arrived here; not a new attempt."""
        if pair not in self._unsure:
            return []
        found = await self._reclaim(pair, counted=False)
        self._unsure.discard(pair)
        return found

    async def _reclaim(self, pair: Pair, *, counted: bool) -> list[Entry]:
        stream, group = pair
        held = self._held.get(pair, set())
        start = "-"
        found: list[Entry] = []
        while start:
            args = [group, self._consumer, start, RECLAIM_PAGE, int(counted), *held]

            def fetch(args: list[str | int] = args) -> Awaitable[Any]:
                return self._link.run(scripts.RECLAIM, [self._keys.stream(stream)], args)

            reply = await self._guarded(pair, fetch)
            start = cast(bytes, reply[0]).decode()
            found += reply[1]
        return found

    async def _guarded(self, pair: Pair, fetch: Callable[[], Awaitable[Any]]) -> list[Any]:
        """`fetch`, with the group made where it is missing. Where what the server handed out may not have
        arrived, the pair is unsure from now on."""
        losses = self._link.losses
        arrived = False
        try:
            try:
                reply = await fetch()
            except MissingGroup:
                await self._make_group(pair)
                reply = await fetch()
            arrived = self._link.losses == losses
            return reply or []
        finally:
            if not arrived:
                self._unsure.add(pair)

    async def _make_group(self, pair: Pair) -> None:
        """From the stream's beginning: what was sent before the group existed, or before the server forgot
        it, counts."""
        stream, group = pair
        if pair in self._held:
            _log.warning("redis lost a consumer group, made again", stream=stream, group=group)
            self._counts["groups_lost"] += 1
            self._held[pair].clear()
        try:
            await self._link.call("XGROUP", "CREATE", self._keys.stream(stream), group, "0", "MKSTREAM")
        except BusError as error:
            if "BUSYGROUP" not in str(error):
                raise

    # --- entries to deliveries ------------------------------------------------------------------------------

    async def _deliver(self, pair: Pair, entries: list[Entry]) -> list[Delivery]:
        """Deliveries of what can be worked on; the rest becomes dead letters."""
        try:
            return [delivery for entry in entries if (delivery := await self._open(pair, entry)) is not None]
        except BaseException:
            # The caller gets none of them: the next read must bring them back.
            self._held[pair].difference_update(_id_of(entry) for entry in entries)
            self._unsure.add(pair)
            raise

    async def _open(self, pair: Pair, entry: Entry) -> Delivery | None:
        stream, group = pair
        entry_id, attempt = _id_of(entry), int(entry[2])
        body = entry_body(entry[1])
        message, reason = read_entry(stream, entry[1])
        if message is not None and stream_rule(stream).limited and attempt > self._limits.max_attempts:
            reason = f"given up after {attempt - 1} attempts: its worker was lost each time, or never finished"
            attempt -= 1
        if message is None or reason:
            await self.bury(stream, group, entry_id, body, attempt, reason)
            return None
        if attempt > 1:
            self._counts["redelivered"] += 1
        return Delivery(stream, group, entry_id, message, attempt, body)


def _id_of(entry: Entry) -> str:
    return cast(bytes, entry[0]).decode()
