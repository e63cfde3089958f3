"""The receiving half of the bus: entries become deliveries, deliveries are kept, given back or given up.

Redis counts a delivery when it hands an entry out, so an attempt is counted before its work starts. `held`
are the entries that this process knows it has; after a cancelled read or a broken connection the server may
have handed out more than arrived, and the next read brings those back first.
"""

from __future__ import annotations

import time
from collections import Counter
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

_log = structlog.get_logger("tlt.bus")


def group_deliveries(deliveries: Iterable[Delivery]) -> dict[tuple[str, str], list[Delivery]]:
    """By (stream, group), order kept."""
    grouped: dict[tuple[str, str], list[Delivery]] = {}
    for delivery in deliveries:
        grouped.setdefault((delivery.stream, delivery.group), []).append(delivery)
    return grouped


def block_option(seconds: float) -> tuple[str | int, ...]:
    """BLOCK for that long. No option at all for 0: BLOCK 0 would wait for ever."""
    milliseconds = int(min(seconds, BLOCK_S) * 1000)
    return ("BLOCK", milliseconds) if milliseconds > 0 else ()


class Inbox:
    """Reads for one consumer. The public meaning of each method is on `Bus`."""

    def __init__(
        self, link: Link, keys: Keys, limits: LimitsConfig, consumer: str, counts: Counter[str]
    ) -> None:
        self._link = link
        self._keys = keys
        self._limits = limits
        self._consumer = consumer
        self._counts = counts
        self._held: dict[tuple[str, str], set[str]] = {}
        self._unsure: set[tuple[str, str]] = set()

    async def read(self, stream: str, group: str, count: int, block_s: float) -> list[Delivery]:
        deadline = time.monotonic() + block_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            found = await self._stranded(stream, group) or await self._fresh(stream, group, count, left_s)
            deliveries = await self._accept(stream, group, found)
            if deliveries or time.monotonic() >= deadline:
                return deliveries

    async def recover(self, stream: str, group: str) -> list[Delivery]:
        return await self._accept(stream, group, await self._reclaim(stream, group, counted=True))

    async def claim(self, stream: str, group: str, count: int) -> list[Delivery]:
        args = [group, self._consumer, int(self._limits.lease_s * 1000), count]
        found = await self._stranded(stream, group)
        found += await self._guarded(
            stream, group, lambda: self._link.run(scripts.CLAIM, [self._keys.stream(stream)], args)
        )
        return await self._accept(stream, group, found)

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

    async def bury(
        self, stream: str, group: str, entry_id: str, body: bytes, attempts: int, reason: str
    ) -> None:
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

    async def _fresh(self, stream: str, group: str, count: int, block_s: float) -> list[Entry]:
        key = self._keys.stream(stream)
        command = ["XREADGROUP", "GROUP", group, self._consumer, "COUNT", count, *block_option(block_s)]
        reply = await self._guarded(stream, group, lambda: self._link.call(*command, "STREAMS", key, ">"))
        return [[entry_id, fields, 1] for entry_id, fields in reply[0][1]] if reply else []

    async def _stranded(self, stream: str, group: str) -> list[Entry]:
        """Entries handed out by the server that never arrived here; not a new attempt."""
        if (stream, group) not in self._unsure:
            return []
        found = await self._reclaim(stream, group, counted=False)
        self._unsure.discard((stream, group))
        return found

    async def _reclaim(self, stream: str, group: str, *, counted: bool) -> list[Entry]:
        held = self._held.get((stream, group), set())
        start = "-"
        found: list[Entry] = []
        while start:
            args = [group, self._consumer, start, RECLAIM_PAGE, int(counted), *held]

            def fetch(args: list[str | int] = args) -> Awaitable[Any]:
                return self._link.run(scripts.RECLAIM, [self._keys.stream(stream)], args)

            reply = await self._guarded(stream, group, fetch)
            if not reply:
                break
            start = cast(bytes, reply[0]).decode()
            found += reply[1]
        return found

    async def _guarded(self, stream: str, group: str, fetch: Callable[[], Awaitable[Any]]) -> list[Any]:
        """`fetch`, with the group made where it is missing. If what the server handed out may not have
        arrived, the pair is unsure from now on."""
        losses = self._link.losses
        try:
            return await fetch() or []
        except MissingGroup:
            await self._make_group(stream, group)
            return await fetch() or []
        except BaseException:
            self._unsure.add((stream, group))
            raise
        finally:
            if self._link.losses != losses:
                self._unsure.add((stream, group))

    async def _make_group(self, stream: str, group: str) -> None:
        """From the stream's beginning: what was sent before the group existed, or before the server forgot
        it, counts."""
        if (stream, group) in self._held:
            _log.warning("redis lost a consumer group, made again", stream=stream, group=group)
            self._counts["groups_lost"] += 1
            self._held[stream, group].clear()
        try:
            await self._link.call("XGROUP", "CREATE", self._keys.stream(stream), group, "0", "MKSTREAM")
        except BusError as error:
            if "BUSYGROUP" not in str(error):
                raise

    # --- entries to deliveries ------------------------------------------------------------------------------

    async def _accept(self, stream: str, group: str, entries: list[Entry]) -> list[Delivery]:
        held = self._held.setdefault((stream, group), set())
        held.update(cast(bytes, entry[0]).decode() for entry in entries)
        rule = stream_rule(stream)
        deliveries: list[Delivery] = []
        for raw_id, fields, attempt in entries:
            entry_id, body = cast(bytes, raw_id).decode(), entry_body(fields)
            message, reason = read_entry(stream, fields)
            if message is not None and rule.limited and attempt > self._limits.max_attempts:
                reason = (
                    f"given up after {attempt - 1} attempts: its worker was lost each time, or never finished"
                )
            if message is None or reason:
                await self.bury(stream, group, entry_id, body, attempt - 1 if message else attempt, reason)
                continue
            if attempt > 1:
                self._counts["redelivered"] += 1
            deliveries.append(Delivery(stream, group, entry_id, message, attempt, body))
        return deliveries
