"""Authentication and framing of control messages, fuzzed."""

from __future__ import annotations

import os
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_spark_runner.launch.channel import (
    MAX_BODY_BYTES,
    ChannelError,
    FrameCodec,
    new_nonce,
)

KEY = b"k" * 32


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
    with pytest.raises(ChannelError):
        server.feed(frame)


def test_a_frame_of_another_connection_is_refused() -> None:
    _, client = pair()
    server, _ = pair()
    with pytest.raises(ChannelError):
        server.feed(client.encode({"type": "log"}))


def test_a_reflected_frame_is_refused() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError):
        server.feed(server.encode({"type": "stop"}))


def test_a_huge_length_is_refused_before_it_is_read() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="announced"):
        server.feed(struct.pack("!I", MAX_BODY_BYTES + 1))


def test_a_huge_message_is_not_sent() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError):
        server.encode({"x": "a" * MAX_BODY_BYTES})


@settings(max_examples=200)
@given(st.binary(min_size=1, max_size=200))
def test_noise_is_never_a_message(noise: bytes) -> None:
    server, _ = pair()
    try:
        assert server.feed(noise) == []
    except ChannelError:
        pass


@settings(max_examples=100)
@given(st.integers(min_value=0), st.integers(1, 255))
def test_any_changed_byte_is_noticed(place: int, change: int) -> None:
    server, client = pair()
    frame = bytearray(client.encode({"type": "log", "lines": ["text"]}))
    frame[place % len(frame)] ^= change
    try:
        assert server.feed(bytes(frame) + os.urandom(64)) == []
    except ChannelError:
        pass
