"""The handshake, authentication and framing of control messages, fuzzed."""

from __future__ import annotations

import hmac
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_spark_runner.cluster.protocol.channel import (
    MAC_BYTES,
    MAX_BODY_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Channel,
    ChannelError,
    Handshake,
)
from horovod_spark_runner.cluster.protocol.messages import (
    INSTRUCTIONS,
    Envelope,
    Gather,
    Instruction,
    Log,
    Notice,
    Stop,
)
from horovod_spark_runner.typed_json import MessageError, to_json

KEY = b"k" * 32
HEADER_BYTES = 4
Server = Channel[Envelope]
Client = Channel[Instruction]


def pair(key: bytes = KEY, other: bytes = KEY) -> tuple[Server, Client]:
    server, client = handshakes(key, other)
    return server.channel(Envelope), client.channel(*INSTRUCTIONS)


def handshakes(key: bytes = KEY, other: bytes = KEY) -> tuple[Handshake, Handshake]:
    server, client = Handshake(key, listened=True), Handshake(other, listened=False)
    server.derive_keys(client.nonce)
    client.derive_keys(server.nonce)
    return server, client


def log(*lines: str) -> Envelope:
    return Envelope(1, 3, "h", Log(lines))


messages = st.builds(
    Envelope,
    st.integers(),
    st.integers(),
    st.text(),
    st.builds(Log, st.lists(st.text()).map(tuple)) | st.builds(Notice, st.text(), st.booleans()),
)


@settings(max_examples=50)
@given(st.lists(messages, max_size=5), st.integers(0, 2**32))
def test_messages_survive_any_split(messages: list[Envelope], seed: int) -> None:
    server, client = pair()
    stream = b"".join(client.encode(message) for message in messages)
    chance = random.Random(seed)
    received: list[object] = []
    while stream:
        cut = chance.randint(1, len(stream))
        received += server.feed(stream[:cut])
        stream = stream[cut:]
    assert received == messages


def test_each_side_hears_the_other() -> None:
    server, client = pair()
    assert server.feed(client.encode(log("text"))) == [log("text")]
    instructions = [Gather(), Stop("enough")]
    assert client.feed(b"".join(map(server.encode, instructions))) == instructions


def test_each_side_proves_that_it_holds_the_key() -> None:
    server, client = Handshake(KEY, listened=True), Handshake(KEY, listened=False)
    assert len(client.nonce) == len(server.nonce) == NONCE_BYTES
    assert client.nonce != server.nonce
    of_server, of_client = server.derive_keys(client.nonce), client.derive_keys(server.nonce)
    assert len(of_server) == len(of_client) == PROOF_BYTES
    server.verify(of_client)
    client.verify(of_server)
    for side, proof in ((server, of_server), (client, of_client)):  # sent back
        with pytest.raises(ChannelError, match="key"):
            side.verify(proof)


def test_a_stranger_proves_nothing() -> None:
    server, client = Handshake(KEY, listened=True), Handshake(b"x" * 32, listened=False)
    of_server, of_client = server.derive_keys(client.nonce), client.derive_keys(server.nonce)
    for side, proof in ((server, of_client), (client, of_server)):
        with pytest.raises(ChannelError, match="key"):
            side.verify(proof)


def test_a_proof_of_another_connection_is_refused() -> None:
    server, client = Handshake(KEY, listened=True), Handshake(KEY, listened=False)
    server.derive_keys(client.nonce)
    captured = client.derive_keys(server.nonce)
    again = Handshake(KEY, listened=True)
    again.derive_keys(client.nonce)
    with pytest.raises(ChannelError, match="key"):
        again.verify(captured)


def test_a_frame_of_a_stranger_is_refused() -> None:
    server, client = pair(other=b"x" * 32)
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(client.encode(log()))


def test_a_captured_frame_is_refused_again() -> None:
    server, client = pair()
    frame = client.encode(log())
    server.feed(frame)
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(frame)


def test_a_frame_of_another_connection_is_refused() -> None:
    _, client = pair()
    server, _ = pair()
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(client.encode(log()))


def test_a_reflected_frame_is_refused() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(server.encode(Stop("enough")))


@pytest.mark.parametrize("listened", [True, False])
def test_nobody_can_be_made_to_talk_to_himself(listened: bool) -> None:
    """Neither one who is sent back his own bytes, nor two who both listen, or both connect."""
    alone = Handshake(KEY, listened=listened)
    own_proof = alone.derive_keys(alone.nonce)
    with pytest.raises(ChannelError, match="key"):
        alone.verify(own_proof)
    one, two = (Handshake(KEY, listened=listened) for _ in range(2))
    proof = one.derive_keys(two.nonce)
    two.derive_keys(one.nonce)
    with pytest.raises(ChannelError, match="key"):
        two.verify(proof)
    with pytest.raises(ChannelError, match="authentication"):
        two.channel(Envelope).feed(one.channel(Envelope).encode(log()))


def test_a_huge_length_is_refused_before_it_is_read() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match=str(MAX_BODY_BYTES)):
        server.feed(struct.pack("!I", MAX_BODY_BYTES + 1))


def test_a_huge_message_is_not_sent() -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="4194304"):
        server.encode(Stop("a" * MAX_BODY_BYTES))


def framed(mac: bytes, body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + mac + body


@settings(max_examples=200)
@given(st.binary(min_size=MAC_BYTES, max_size=MAC_BYTES), st.binary(max_size=200))
def test_well_framed_noise_is_refused(mac: bytes, body: bytes) -> None:
    server, _ = pair()
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(framed(mac, body))


@settings(max_examples=50)
@given(messages)
def test_a_message_with_the_code_of_another_key_is_refused(message: Envelope) -> None:
    server, client = pair()
    body = to_json(message).encode()
    for key in (KEY, b"", b"x" * 32):  # the run's key itself is the key of no direction
        mac = hmac.digest(key, struct.pack("!Q", 0) + body, "sha256")
        with pytest.raises(ChannelError, match="authentication"):
            pair()[0].feed(framed(mac, body))
    # What is wrong with the above is nothing but its code.
    frame = client.encode(message)
    assert frame[HEADER_BYTES + MAC_BYTES :] == body
    assert server.feed(frame) == [message]


@given(st.data())
def test_a_frame_that_is_cut_is_waited_for(data: st.DataObject) -> None:
    server, client = pair()
    frame = client.encode(log("text"))
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert server.feed(frame[:cut]) == []
    assert server.feed(frame[cut:]) == [log("text")]


@given(st.data())
def test_a_frame_that_has_lost_bytes_takes_the_next_one_with_it(data: st.DataObject) -> None:
    server, client = pair()
    frame = client.encode(log("text"))
    begin = data.draw(st.integers(HEADER_BYTES, len(frame) - 1))
    end = data.draw(st.integers(begin + 1, len(frame)))
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(frame[:begin] + frame[end:] + client.encode(log("x" * 200)))


def test_frames_in_another_order_are_refused() -> None:
    server, client = pair()
    first, second = client.encode(log("1")), client.encode(log("2"))
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(second + first)


FRAME = len(pair()[1].encode(log("text")))
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
            frame = bytearray(client.encode(log("text")))
            assert len(frame) == FRAME
            frame[place] ^= 1 << bit
            # As many bytes as any length that is allowed: so that none is waited for.
            (length,) = struct.unpack_from("!I", frame)
            more = length - (FRAME - HEADER_BYTES - MAC_BYTES)
            filled = bytes(frame) + bytes(max(0, more) if length <= MAX_BODY_BYTES else 0)
            with pytest.raises(ChannelError, match="authentication|" + str(MAX_BODY_BYTES)):
                server.feed(filled)


def test_raw_data_are_authenticated_too() -> None:
    server, client = pair()
    frame = client.encode_data(b"some data")
    with pytest.raises(ChannelError, match="authentication"):
        pair()[0].feed(frame)
    assert server.feed(frame) == [b"some data"]
    with pytest.raises(ChannelError, match="authentication"):
        server.feed(frame)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"[1]", r"object.*\[1\]"),
        (b"1", r"object.*\b1"),
        (b"null", "object.*None"),
        (b"", "JSON"),
        (b"not JSON", "JSON"),
        (b"\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"kind":"Stop","reason":"of another direction"}', "'Stop'.*Envelope"),
        (b'{"slot":1,"rank":1,"host":"h","message":{"kind":"Hello"}}', "None.*Envelope"),
    ],
)
def test_a_body_that_is_no_message_is_refused_of_a_holder_of_the_key_too(
    body: bytes, error: str
) -> None:
    server, client = pair()
    with pytest.raises(MessageError, match=error):
        server.feed(client._frame(body))
