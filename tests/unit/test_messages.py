"""Messages survive the wire unchanged, and bytes that are none are refused with InvalidMessage and nothing else."""

from __future__ import annotations

from typing import get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.samples import completion, one_of_each, request
from tlt_pipeline import messages as m

FUZZ = settings(max_examples=150, deadline=None, derandomize=True, database=None)
KINDS = [message.kind for message in one_of_each()]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=12)
)
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def decode_or_refuse(body: bytes) -> m.AnyMessage | None:
    """Any other exception than InvalidMessage fails the test."""
    try:
        return m.decode(body)
    except m.InvalidMessage as error:
        assert str(error)
        assert "\n" not in str(error).strip()
        return None


def test_samples_cover_every_kind():
    assert {type(message) for message in one_of_each()} == set(get_args(m.AnyMessage))


@pytest.mark.parametrize("message", one_of_each(), ids=KINDS)
def test_round_trip_is_equal(message: m.AnyMessage):
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize("message", one_of_each(), ids=KINDS)
def test_messages_are_frozen(message: m.AnyMessage):
    with pytest.raises(ValidationError):
        message.schema_version = 2  # type: ignore[misc,assignment]


@given(st.lists(st.floats(width=32), max_size=50))
@FUZZ
def test_logprobs_travel_bit_for_bit(values: list[float]):
    array = m.Array.of(values, "float32")
    sent = completion(request(), logprobs=array)
    received = m.decode(m.encode(sent))
    assert isinstance(received, m.Completion)
    assert received.logprobs.data == np.asarray(values, dtype="<f4").tobytes()


@given(st.binary(max_size=400))
@FUZZ
def test_random_bytes_are_refused(body: bytes):
    decode_or_refuse(body)


@given(st.data())
@FUZZ
def test_damaged_messages_are_refused_or_valid(data: st.DataObject):
    body = bytearray(m.encode(data.draw(st.sampled_from(one_of_each()))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for damaged in (bytes(body), bytes(body[:cut]), bytes(body) + b"\x00"):
        message = decode_or_refuse(damaged)
        if message is not None:
            assert m.decode(m.encode(message)).kind == message.kind


@given(st.sampled_from(one_of_each()), st.data())
@FUZZ
def test_wrong_fields_are_refused_or_valid(message: m.AnyMessage, data: st.DataObject):
    content = message.model_dump(mode="python")
    field = data.draw(st.sampled_from(sorted(content)))
    content[field] = data.draw(NESTED)
    content |= data.draw(st.dictionaries(st.text(max_size=5), NESTED, max_size=1))
    decode_or_refuse(msgpack.packb(content))


@given(NESTED)
@FUZZ
def test_other_msgpack_is_refused(content: object):
    assert decode_or_refuse(msgpack.packb(content)) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91" * 5000,  # nested deeper than any message
        msgpack.packb(list(range(70_000))),
        msgpack.packb({1: 2}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb({"kind": "shutdown", "reason": "x", "extra": 1}),
        msgpack.packb({"kind": "no_such_kind"}),
        msgpack.packb({"kind": "shutdown", "schema_version": 2, "reason": "x"}),
        b"\xdd\xff\xff\xff\xff",  # says it is an array of 4 billion
        b"\xa2\xff\xff",  # no UTF-8
        bytes(m.MAX_MESSAGE_BYTES + 1),
    ],
    ids=["empty", "deep", "long", "int-key", "ext", "extra", "kind", "version", "lies", "utf8", "size"],
)
def test_hostile_bytes_are_refused(body: bytes):
    assert decode_or_refuse(body) is None


def test_array_length_must_fit_its_bytes():
    content = request().model_dump(mode="python")
    content["prompt"]["length"] = 4
    with pytest.raises(m.InvalidMessage, match=r"prompt.*4 × int32"):
        m.decode(msgpack.packb(content))


def test_what_is_too_large_says_to_use_a_blob():
    with pytest.raises(ValueError, match="BlobRef"):
        m.encode(request(entry="x" * m.MAX_MESSAGE_BYTES))
