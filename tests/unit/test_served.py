"""Numbers that ranks ask each other for over connections, with threads for ranks."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import EnvironmentProblem, LaunchError
from horovod_spark_runner.cluster.protocol.channel import NONCE_BYTES, PROOF_BYTES
from horovod_spark_runner.sync import distributed_memory as served
from horovod_spark_runner.sync.distributed_memory import DistributedMemory
from tests.threads import Threads, as_ranks

KEY = os.urandom(32)
HERE = "127.0.0.1"


class Ranks:
    """Ranks that are threads; see `Ranks`."""

    def __init__(self, wire: Threads, reach: Callable[[Any], Any] = lambda place: place) -> None:
        self.rank, self.size, self._wire, self._reach = wire.rank, wire.size, wire, reach

    def memory(self, values: np.ndarray, holders: Sequence[int]) -> DistributedMemory:
        return DistributedMemory(values, holders, self, HERE, KEY)

    def gather(self, value: Any) -> list[Any]:
        found = self._wire.gather(np.array([value, None], object))
        return [self._reach(one[0]) for one in found]

    def barrier(self) -> None:
        self._wire.sum(np.zeros(1))


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hsr-weights")]


@pytest.mark.parametrize("holders", [[0], [0, 2], [0, 1, 2]], ids=["one", "two", "all"])
@pytest.mark.parametrize("size", [7, 2])
def test_what_ranks_add_is_there_once(
    monkeypatch: pytest.MonkeyPatch, holders: list[int], size: int
) -> None:
    monkeypatch.setattr(served, "_PIECE", 2)  # parts of several pieces, or of none
    begin, each = np.arange(size, dtype=np.float32), 200

    def act(wire: Threads) -> tuple[np.ndarray, np.ndarray, list[int]]:
        ranks = Ranks(wire)
        memory = DistributedMemory(begin, holders, ranks, HERE, KEY)
        count = DistributedMemory(np.array([5, 40], np.int64), [1], ranks, HERE, KEY)
        seen = []
        for number in range(each):
            memory.add(np.full(size, wire.rank + 1, np.float32))
            seen.append(count.add_at(1, 2))
            assert (memory.get() >= begin + (number + 1) * (wire.rank + 1)).all()
        ranks.barrier()
        found = memory.get(), count.get(), seen
        memory.close()
        count.close()
        return found

    told = as_ranks(3, act)
    for values, counted, _ in told:
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, begin + each * (1 + 2 + 3))
        np.testing.assert_array_equal(counted, [5, 40 + 2 * 3 * each])
    every = sorted(number for *_, seen in told for number in seen)
    assert every == list(range(40, 40 + 2 * 3 * each, 2))
    assert own_threads() == []


def strange(place: Any) -> Any:
    """Connect as somebody would who does not hold the key; then go on."""
    _, address = place
    if address is not None:
        with socket.create_connection(address, 5) as connection:
            connection.settimeout(60)
            connection.sendall(os.urandom(NONCE_BYTES + PROOF_BYTES))
            assert len(connection.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            assert connection.recv(1) == b""  # refused
    return place


def test_strangers_are_refused_and_disturb_nobody() -> None:
    def act(wire: Threads) -> np.ndarray:
        memory = DistributedMemory(np.zeros(3), [0], Ranks(wire, strange), HERE, KEY)
        memory.add(np.ones(3))
        wire.gather(np.zeros(1))
        found = memory.get()
        memory.close()
        return found

    for values in as_ranks(2, act):
        np.testing.assert_array_equal(values, [2, 2, 2])
    assert own_threads() == []


@pytest.mark.parametrize("again", [False, True])
def test_a_holder_that_does_not_answer_is_a_clear_error(again: bool) -> None:
    """Once it was reached, it has ended, which follows from what has ended it."""

    def act(wire: Threads) -> str:
        if wire.rank == 0:
            server = served._Server(np.zeros(3), 0, HERE, KEY)
            Ranks(wire).gather(("elsewhere", server.address))
            wire.gather(np.zeros(1))
            server.admit_no_more()
            server.close()
            return ""
        with pytest.raises(LaunchError if again else EnvironmentProblem) as caught:
            DistributedMemory(np.zeros(3), [0], Ranks(wire), HERE, bytes(32), again=again)
        wire.gather(np.zeros(1))
        return str(caught.value)

    _, message = as_ranks(2, act)
    if again:
        assert re.search(r"connection.*rank 0\b.*\belsewhere", message)
    else:
        assert re.search(r"rank 0\b.*\belsewhere\b.*127.0.0.1", message)
        assert "network_interface" in message
    assert own_threads() == []


def test_a_holder_that_is_gone_is_told_as_what_follows_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver takes a `LaunchError` of a rank for less telling than that another was killed."""

    def act(wire: Threads) -> list[str]:
        memory = DistributedMemory(np.zeros(4), [1], Ranks(wire), HERE, KEY)
        wire.gather(np.zeros(1))
        if wire.rank == 1:
            assert memory._server is not None
            memory._server.close()
            wire.gather(np.zeros(1))
            return []
        wire.gather(np.zeros(1))
        told = []
        for ask in (memory.get, lambda: memory.add(np.ones(4)), lambda: memory.add_at(0, 1)):
            with pytest.raises(LaunchError) as caught:
                ask()
            told.append(str(caught.value))
        memory._connections[1].close()
        return told

    told, _ = as_ranks(2, act)
    for message in told:
        assert re.search(rf"rank 0\b.*{socket.gethostname()}.*rank 1\b", message)
    assert own_threads() == []
