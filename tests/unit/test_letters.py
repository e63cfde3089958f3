"""Dead letters are bounded, whatever the entry was."""

from __future__ import annotations

import msgpack

from tlt_pipeline.bus.letters import MAX_LETTER_BODY, MAX_LETTER_ID, letter_for
from tlt_pipeline.messages import encode


def test_the_letter_of_a_huge_foreign_entry_can_be_sent() -> None:
    body = msgpack.packb({"kind": "zz", "request_id": "A" * 1_000_000})
    letter = letter_for("rollout.requests", "1-0", body, 3, "undecodable")
    assert letter.request_id == "A" * MAX_LETTER_ID
    assert len(letter.body) == MAX_LETTER_BODY and "body cut from" in letter.reason
    encode(letter)
