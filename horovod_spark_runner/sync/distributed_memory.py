"""Numbers that all ranks read and add to, held by some of the ranks.

They are asked over connections of our own, not by MPI. A thread for each of the other ranks waits
in the kernel for what that rank asks, so a holder answers whatever else it does, and one that is
slow to ask holds up nobody. Only Python's lock keeps it from that: while there is such memory, no
rank may wait in mpi4py's ``allreduce`` of objects, which does not leave the lock, before all ranks
have met (in `Ranks.barrier`, which does). docs/architecture.md says why it is not MPI that asks.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn, Protocol

import numpy as np

from ..cluster.protocol.channel import Handshake, connect, receive_exactly
from ..cluster.protocol.listener import Listener
from ..errors import EnvironmentProblem, LaunchError

# A request: its kind, first and end index, and the value to add.
_REQUEST = struct.Struct("!Bqqq")
_GET, _ADD, _ADD_AT = range(3)
_DONE = b"\1"
# Numbers that are read or added at once, and bytes of each rank's that wait for that.
_PIECE = 1 << 18
# Seconds after which a rank that does not answer counts as lost.
_OPENING = 60.0
# Seconds between polls for ranks that have not connected.
_TICK = 0.05
# Seconds of silence after which TCP probes a connection.
_KEEPALIVE = 60


class Memory(Protocol):
    """An array that all ranks share."""

    def get(self) -> np.ndarray:
        """Return a copy, which may include concurrent additions, or parts of them."""
        ...

    def add(self, values: np.ndarray) -> None:
        """Add an array of the same size: nothing that is added is lost or counts twice."""
        ...

    def add_at(self, index: int, value: int) -> int:
        """Add to one number atomically; return its previous value, which no other rank receives."""
        ...

    def close(self) -> None:
        """Release it, once no rank uses it any more; all ranks must call it."""
        ...


class Ranks(Protocol):
    """This rank among all; all ranks call the same in the same order.

    Attributes:
        rank: this one.
        size: how many there are.
    """

    rank: int
    size: int

    def memory(self, values: np.ndarray, holders: Sequence[int]) -> Memory:
        """Return memory that begins with flat values, alike on all ranks, which all call this.

        Args:
            values: what it is to begin with.
            holders: the ranks that hold it, an equal part each.
        """
        ...

    def gather(self, value: object) -> list[Any]:
        """Return all ranks' values."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...


class DistributedMemory:
    """`Memory` over sockets, whose parts some of the ranks hold; all ranks create it together.

    Args:
        values: what it is to begin with, flat and alike on all ranks.
        holders: the ranks that hold it, an equal part each.
        ranks: all of them.
        address: IP address the others reach this rank at.
        key: secret of all ranks.
        again: whether all have reached each other before.

    Raises:
        EnvironmentProblem: a holder cannot be reached.
        LaunchError: one that was reached before cannot be reached any more.
    """

    def __init__(
        self,
        values: np.ndarray,
        holders: Sequence[int],
        ranks: Ranks,
        address: str,
        key: bytes,
        *,
        again: bool = False,
    ) -> None:
        self._ranks, self._dtype, self._size = ranks, values.dtype, values.size
        self._parts = divided(values.size, holders)
        self._again = again
        self._server: _Server | None = None
        if ranks.rank in self._parts:
            begin, end = self._parts[ranks.rank]
            try:
                self._server = _Server(values[begin:end].copy(), begin, address, key)
            except OSError as error:
                raise EnvironmentProblem(
                    f"sync=AsyncServer(…): rank {ranks.rank} on {socket.gethostname()} cannot "
                    f"listen at {address} for the other ranks: {error}"
                ) from error
        places = ranks.gather((socket.gethostname(), self._server and self._server.address))
        self._hosts = [host for host, _ in places]
        self._connections = {
            rank: self._connect(rank, places[rank][1], key)
            for rank in self._parts
            if rank != ranks.rank
        }
        ranks.barrier()
        if self._server is not None:
            self._server.admit_no_more()

    def _connect(self, rank: int, address: tuple[str, int], key: bytes) -> socket.socket:
        try:
            connection, _ = connect(address, _OPENING, key)
        except OSError as error:
            if self._again:  # it has ended meanwhile
                self._lost(rank, error)
            raise EnvironmentProblem(
                f"sync=AsyncServer(…): rank {self._ranks.rank} on {socket.gethostname()} asks the "
                f"ranks that hold the weights, but rank {rank} on {self._hosts[rank]} did not "
                f"answer at {address[0]} port {address[1]} within {_OPENING:.0f} s ({error}). Let "
                "the hosts connect to each other on all ports (a firewall may forbid it), choose "
                "another network with launch=LaunchOptions(mpi=MpiOptions("
                "network_interface=…)), or use sync=LocalSGD(…)"
            ) from error
        _make_lasting(connection)
        return connection

    def get(self) -> np.ndarray:
        numbers = np.empty(self._size, self._dtype)
        for rank, connection in self._connections.items():
            begin, end = self._parts[rank]
            self._ask(rank, connection, _GET, begin, end)
        if self._server is not None:
            begin, end = self._parts[self._ranks.rank]
            self._server.read(begin, end, numbers[begin:end])
        for rank, connection in self._connections.items():
            begin, end = self._parts[rank]
            self._receive(rank, connection, numbers[begin:end])
        return numbers

    def add(self, values: np.ndarray) -> None:
        numbers = np.ascontiguousarray(values, self._dtype)
        for rank, connection in self._connections.items():
            begin, end = self._parts[rank]
            self._ask(rank, connection, _ADD, begin, end, payload=numbers[begin:end])
        if self._server is not None:
            begin, end = self._parts[self._ranks.rank]
            for at in range(begin, end, _PIECE):
                self._server.add(at, numbers[at : min(at + _PIECE, end)])
        done = np.empty(1, np.uint8)
        for rank, connection in self._connections.items():
            self._receive(rank, connection, done)

    def add_at(self, index: int, value: int) -> int:
        rank = _holder_of(self._parts, index)
        if self._server is not None and rank == self._ranks.rank:
            return int(self._server.add_at(index, value))
        connection = self._connections[rank]
        self._ask(rank, connection, _ADD_AT, index, index + 1, value)
        before = np.empty(1, self._dtype)
        self._receive(rank, connection, before)
        return int(before[0])

    def _ask(
        self,
        rank: int,
        connection: socket.socket,
        kind: int,
        begin: int,
        end: int,
        value: int = 0,
        payload: np.ndarray | None = None,
    ) -> None:
        try:
            connection.sendall(_REQUEST.pack(kind, begin, end, value))
            if payload is not None:
                connection.sendall(_bytes(payload))
        except OSError as error:
            self._lost(rank, error)

    def _receive(self, rank: int, connection: socket.socket, into: np.ndarray) -> None:
        try:
            _fill(connection, into)
        except OSError as error:
            self._lost(rank, error)

    def _lost(self, rank: int, error: Exception) -> NoReturn:
        # A type that the driver treats as a consequence of another rank's failure.
        raise LaunchError(
            f"sync=AsyncServer(…): rank {self._ranks.rank} on {socket.gethostname()} has lost its "
            f"connection to rank {rank} on {self._hosts[rank]}, which holds a part of the weights "
            f"({error}): that rank has ended, or the network between the hosts has failed"
        ) from error

    def close(self) -> None:
        self._ranks.barrier()  # no request follows it
        for connection in self._connections.values():
            connection.close()
        if self._server is not None:
            self._server.close()


class _Server:
    """One rank's part of the numbers, and the threads that serve the others.

    Args:
        numbers: the numbers it holds.
        first: the place of the first one among all.
        address: IP address to listen at.
        key: secret of all ranks; who does not hold it is dropped.
    """

    def __init__(self, numbers: np.ndarray, first: int, address: str, key: bytes) -> None:
        self._numbers, self._first = numbers, first
        self._lock = threading.Lock()  # of the numbers
        self._listener = Listener(address, key, self._admit)
        self._all_came = threading.Event()
        self.address = self._listener.address
        self._peers: list[tuple[socket.socket, threading.Thread]] = []
        self._door = threading.Thread(target=self._listen, name="hsr-weights-door", daemon=True)
        self._door.start()

    def read(self, begin: int, end: int, into: np.ndarray) -> None:
        """Copy numbers by their global positions, with or without concurrent additions."""
        with self._lock:
            into[:] = self._numbers[begin - self._first : end - self._first]

    def add(self, begin: int, values: np.ndarray) -> None:
        """Add to numbers from a place on."""
        at = begin - self._first
        with self._lock:
            self._numbers[at : at + values.size] += values

    def add_at(self, index: int, value: int) -> np.generic:
        """Add to one number; return its previous value."""
        at = index - self._first
        with self._lock:
            before: np.generic = self._numbers[at]
            self._numbers[at] += self._numbers.dtype.type(value)
        return before

    def admit_no_more(self) -> None:
        """All ranks have come: stop to listen."""
        self._all_came.set()
        self._door.join()

    def close(self) -> None:
        """Nobody asks any more: end all threads."""
        for connection, thread in self._peers:
            with contextlib.suppress(OSError):  # the other side was faster
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _listen(self) -> None:
        with contextlib.closing(self._listener):
            while not self._all_came.is_set():
                self._listener.handle(_TICK)

    def _admit(self, connection: socket.socket, handshake: Handshake) -> None:
        _make_lasting(connection)
        thread = threading.Thread(
            target=self._answer, args=(connection,), name="hsr-weights", daemon=True
        )
        self._peers.append((connection, thread))
        thread.start()

    def _answer(self, connection: socket.socket) -> None:
        """Answer one rank until it goes."""
        with connection, contextlib.suppress(OSError):
            buffer = np.empty(min(_PIECE, self._numbers.size), self._numbers.dtype)
            while True:
                request = receive_exactly(connection, _REQUEST.size)
                kind, begin, end, value = _REQUEST.unpack(request)
                if kind == _ADD_AT:
                    connection.sendall(_bytes(np.array([self.add_at(begin, value)])))
                    continue
                for at in range(begin, end, _PIECE):
                    piece = buffer[: min(_PIECE, end - at)]
                    if kind == _GET:
                        self.read(at, at + piece.size, piece)
                        connection.sendall(_bytes(piece))
                    else:
                        _fill(connection, piece)
                        self.add(at, piece)
                if kind == _ADD:
                    connection.sendall(_DONE)


def _make_lasting(connection: socket.socket) -> None:
    """Keep a connection open for the length of a step, and visible to firewalls."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE)


def _bytes(values: np.ndarray) -> memoryview:
    return values.view(np.uint8).data


def _fill(connection: socket.socket, values: np.ndarray) -> None:
    """Receive exactly the size of ``values``.

    Raises:
        OSError: the other side has gone.
    """
    left = _bytes(values)
    while left:
        received = connection.recv_into(left)
        if not received:
            raise ConnectionError("the connection was closed")
        left = left[received:]


def divided(size: int, holders: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return from where to where each of some ranks holds an array: equal parts, in their order."""
    ends = [size * part // len(holders) for part in range(len(holders) + 1)]
    return dict(zip(holders, pairwise(ends), strict=True))


def _holder_of(parts: Mapping[int, tuple[int, int]], index: int) -> int:
    """Return the rank that holds one of the `divided` numbers."""
    return next(rank for rank, (_, end) in parts.items() if index < end)
