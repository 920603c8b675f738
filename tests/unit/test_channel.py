"""Authentication and framing of control messages, fuzzed."""

from __future__ import annotations

import hmac
import json
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_spark_runner.launch.shared.channel import (
    MAC_BYTES,
    MAX_BODY_BYTES,
    ChannelError,
    FrameCodec,
    new_nonce,
)

KEY = b"k" * 32
HEADER_BYTES = 4


def pair(key: bytes = KEY, other: bytes = KEY) -> tuple[FrameCodec, FrameCodec]:
    server, client = new_nonce(), new_nonce()
    return (
        FrameCodec(key, server, client, is_server=True),
        FrameCodec(other, server, client, is_server=False),
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.text(), json_values), max_size=5), st.integers(0, 2**32))
def test_messages_survive_any_split(messages: list[dict[str, object]], seed: int) -> None:
    server, client = pair()
    stream = b"".join(client.encode(message) for message in messages)
    chance = random.Random(seed)
    received: list[object] = []
    while stream:
        cut = chance.randint(1, len(stream))
        received += server.feed(stream[:cut])
        stream = stream[cut:]
    assert received == messages


def test_a_stranger_is_refused() -> None:
    server, client = pair(other=b"x" * 32)
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(client.encode({"type": "log"}))


def test_a_captured_frame_is_refused_again() -> None:
    server, client = pair()
    frame = client.encode({"type": "log"})
    server.feed(frame)
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(frame)


def test_a_frame_of_another_connection_is_refused() -> None:
    _, client = pair()
    server, _ = pair()
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(client.encode({"type": "log"}))


def test_a_reflected_frame_is_refused() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(server.encode({"type": "stop"}))


def test_a_huge_length_is_refused_before_it_is_read() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="announced"):
        server.feed(struct.pack("!I", MAX_BODY_BYTES + 1))


def test_a_huge_message_is_not_sent() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="at most 4194304 fit"):
        server.encode({"x": "a" * MAX_BODY_BYTES})


def framed(mac: bytes, body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + mac + body


@settings(max_examples=200)
@given(st.binary(min_size=MAC_BYTES, max_size=MAC_BYTES), st.binary(max_size=200))
def test_well_framed_noise_is_refused(mac: bytes, body: bytes) -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(framed(mac, body))


@settings(max_examples=50)
@given(json_values)
def test_a_message_with_the_code_of_another_key_is_refused(value: object) -> None:
    server, client = pair()
    body = json.dumps({"type": "log", "value": value}).encode()
    for key in (KEY, b"", b"x" * 32):  # the run's key itself is the key of no direction
        mac = hmac.digest(key, struct.pack("!Q", 0) + body, "sha256")
        with pytest.raises(ChannelError, match="authentication"):
            pair()[0].feed(framed(mac, body))
    # What is wrong with the above is nothing but its code.
    assert server.feed(client.encode({"type": "log", "value": value})) == [json.loads(body)]


@given(st.data())
def test_a_frame_that_is_cut_is_waited_for(data: st.DataObject) -> None:
    server, client = pair()
    message = {"type": "log", "lines": ["text"]}
    frame = client.encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert server.feed(frame[:cut]) == []
    assert server.feed(frame[cut:]) == [message]


@given(st.data())
def test_a_frame_that_has_lost_bytes_takes_the_next_one_with_it(data: st.DataObject) -> None:
    server, client = pair()
    frame = client.encode({"type": "log", "lines": ["text"]})
    begin = data.draw(st.integers(HEADER_BYTES, len(frame) - 1))
    end = data.draw(st.integers(begin + 1, len(frame)))
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(frame[:begin] + frame[end:] + client.encode({"lines": ["x" * 200]}))


def test_frames_in_another_order_are_refused() -> None:
    server, client = pair()
    first, second = client.encode({"number": 1}), client.encode({"number": 2})
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(second + first)


FRAME = len(pair()[1].encode({"type": "log", "lines": ["text"]}))
PARTS = {
    "length": range(HEADER_BYTES),
    "code": range(HEADER_BYTES, HEADER_BYTES + MAC_BYTES),
    "body": range(HEADER_BYTES + MAC_BYTES, FRAME),
}


@pytest.mark.parametrize("part", PARTS)
def test_any_changed_bit_is_refused(part: str) -> None:
    assert len(PARTS[part]) > 0
    for place in PARTS[part]:
        for bit in range(8):
            server, client = pair()
            frame = bytearray(client.encode({"type": "log", "lines": ["text"]}))
            assert len(frame) == FRAME
            frame[place] ^= 1 << bit
            # As many bytes as any length that is allowed: so that none is waited for.
            (length,) = struct.unpack_from("!I", frame)
            more = length - (FRAME - HEADER_BYTES - MAC_BYTES)
            filled = bytes(frame) + bytes(max(0, more) if length <= MAX_BODY_BYTES else 0)
            with pytest.raises(ChannelError, match="authentication|announced"):
                server.feed(filled)


def test_raw_data_are_authenticated_too() -> None:
    server, client = pair()
    frame = client.encode_data(b"some data")
    with pytest.raises(ChannelError, match="authentication"):
        pair()[0].feed(frame)
    assert server.feed(frame) == [b"some data"]
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(frame)


@pytest.mark.parametrize("body", [b"[1]", b"1", b"null"])
def test_a_body_that_is_no_message_is_refused_of_a_holder_of_the_key_too(body: bytes) -> None:
    server, client = pair()
    with pytest.raises(ChannelError, match="holds no message"):
        server.feed(client._frame(body))
