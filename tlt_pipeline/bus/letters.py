"""What an entry of a stream says, or why it can't be read, and the dead letter it becomes. No I/O."""

from __future__ import annotations

from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from tlt_pipeline import messages as m
from tlt_pipeline.bus.streams import stream_rule

_unpack: Any = cast(Any, msgpack).unpackb
BODY_FIELD = b"b"
MAX_LETTER_BODY = 256 * 1024
"""A dead letter keeps so much of the original: dead letters stay, and memory is bounded."""
MAX_LETTER_ID = 200
"""Ours are shorter; what isn't ours may be anything."""


def encode_for(stream: str, message: m.Message) -> bytes:
    """The message's bytes. Raises ValueError: it doesn't belong on this stream, or is over the size limit."""
    if not isinstance(message, stream_rule(stream).accepts):
        raise ValueError(f"a {type(message).__name__} does not belong on {stream}")
    return m.encode(message)


def entry_body(fields: list[bytes] | None) -> bytes:
    """The message's bytes in an entry's flat list of fields and values; empty where there are none."""
    flat = fields or []
    for name, value in zip(flat[::2], flat[1::2], strict=False):
        if name == BODY_FIELD:
            return value
    return b""


def read_entry(stream: str, fields: list[bytes] | None) -> tuple[m.AnyMessage | None, str]:
    """The entry's message; or None and the reason why it is none."""
    body = entry_body(fields)
    if not body:
        return None, "the entry has no field 'b'"
    try:
        message = m.decode(body)
    except m.InvalidMessage as error:
        return None, f"undecodable: {error}"
    if not isinstance(message, stream_rule(stream).accepts):
        return None, f"a {message.kind} does not belong on {stream}"
    return message, ""


def letter_for(stream: str, entry_id: str, body: bytes, attempts: int, reason: str) -> m.DeadLetter:
    """The dead letter of an entry, its body cut at MAX_LETTER_BODY."""
    if len(body) > MAX_LETTER_BODY:
        reason += f" (body cut from {len(body)} bytes)"
    return m.DeadLetter(
        stream=stream,
        entry_id=entry_id,
        reason=reason,
        attempts=attempts,
        body=body[:MAX_LETTER_BODY],
        request_id=request_id_in(body),
    )


def request_id_in(body: bytes) -> str | None:
    """The request id that the bytes carry, also where they aren't a valid message; cut at MAX_LETTER_ID."""
    if len(body) > m.MAX_MESSAGE_BYTES:
        return None
    try:
        content = _unpack(body, raw=False, strict_map_key=True, timestamp=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(content, dict):
        return None
    found: Any = cast(dict[str, Any], content).get("request_id")
    return found[:MAX_LETTER_ID] if isinstance(found, str) else None
