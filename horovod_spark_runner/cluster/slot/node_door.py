"""Doors of a slot: the order to start its host's MPI daemon, and local programs of MPI."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ...errors import LaunchError
from ...typed_json import Message, parse_plain
from ..protocol.channel import Channel, Handshake, connect
from ..protocol.listener import Listener
from ..protocol.messages import StartDaemon
from ..protocol.topology import Node

_INTERFACE = "prte_if_include"
# The other slot may still wait for Spark, which polls once a second.
SEND_TIMEOUT = 15.0
# Seconds that slot 0, connected and proven, may take to send its order.
_ORDER_TIMEOUT = 5.0


class NodeDoor:
    """A TCP port, on the chosen interface only, that takes authenticated messages of slot 0.

    Strangers are dropped and never waited for. An invalid message of a holder of the run's key is
    raised as a `MessageError`.

    Args:
        address: IP address to listen at.
        key: the run's secret.
        on_order: takes the orders of slot 0.
    """

    def __init__(self, address: str, key: bytes, on_order: Callable[[StartDaemon], None]) -> None:
        self._on_order = on_order
        self._listener = Listener(address, key, self._on_peer)
        self.port: int = self._listener.address[1]
        self._is_open = True

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        return {self._listener.fileno(): self._listener.handle} if self._is_open else {}

    def drop_late(self) -> None:
        """Drop peers whose handshake is late."""
        if self._is_open:
            self._listener.handle()

    def close(self) -> None:
        self._is_open = False
        self._listener.close()

    def _on_peer(self, connection: socket.socket, handshake: Handshake) -> None:
        channel = handshake.channel(StartDaemon)
        connection.settimeout(_ORDER_TIMEOUT)
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                for order in channel.feed(data):
                    if isinstance(order, StartDaemon):
                        self._on_order(order)


def send_to_node(node: Node, key: bytes, order: StartDaemon) -> None:
    """Send ``order`` to the slot that leads ``node``.

    Raises:
        LaunchError: it cannot be reached.
    """
    channel: Channel[Message]  # of no kind: there is no answer
    try:
        connection, channel = connect((node.address, node.port), SEND_TIMEOUT, key)
        with connection:
            connection.sendall(channel.encode(order))
            # The peer closes when it has read everything, or drops an unauthenticated message.
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
    except OSError as error:
        raise LaunchError(
            f"host {socket.gethostname()} cannot reach host {node.host} at {node.address} port "
            f"{node.port} ({error}); the hosts of a run must reach each other on all ports: open "
            "them, or choose another network with network_interface"
        ) from error


def daemon_arguments(command: str) -> list[str]:
    """Return the arguments in the shell command that mpirun wants run on another host. Pure.

    Without the program and the network interface: each host has its own, perhaps at another path or
    by another name.
    """
    words = shlex.split(command)
    programs = [i for i, word in enumerate(words) if os.path.basename(word) == "prted"]
    if not programs:
        # "…;export X;/path/prted" holds no blank before the path.
        programs = [i for i, word in enumerate(words) if word.endswith("/prted")]
    if not programs:
        raise LaunchError(f"mpirun wants an unknown program started on another host: {command}")
    arguments = words[programs[-1] + 1 :]
    if _INTERFACE in arguments:
        index = arguments.index(_INTERFACE)
        del arguments[index - 1 : index + 2]  # --prtemca NAME VALUE
    return arguments


@dataclass(frozen=True, slots=True)
class MpiIdentity:
    """Environment that MPI gave a rank; its shim sends it."""

    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class RemoteLaunch:
    """Command that mpirun wants to run elsewhere; sent by its substitute for ssh.

    Attributes:
        host: the node's name.
        command: for a shell.
    """

    host: str
    command: str


T = TypeVar("T")


class Caller:
    """A program that has connected.

    Args:
        connection: its connection.
        on_text: takes the JSON that it sends.
    """

    def __init__(self, connection: socket.socket, on_text: Callable[[Caller, bytes], None]) -> None:
        self._connection = connection
        self._on_text = on_text
        self._received = b""
        self.ended = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def release(self, code: int) -> None:
        """Let the program end with ``code``."""
        with contextlib.suppress(OSError):  # it may have been ended already
            self._connection.sendall(bytes([code]))

    def close(self) -> None:
        self.ended = True
        self._connection.close()

    def read(self) -> None:
        """Read arrived data."""
        try:
            data = self._connection.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.ended = True
            return
        self._received += data
        if self._received.endswith(b"\n"):
            self._on_text(self, self._received)


class JsonDoor(Generic[T]):
    """Unix socket for local programs, each of which sends one JSON object.

    Args:
        path: of the socket, in a private directory.
        kind: class of the object.
        on_call: takes each caller with its object.
    """

    def __init__(self, path: Path, kind: type[T], on_call: Callable[[Caller, T], None]) -> None:
        self.path = str(path)
        self._kind = kind
        self._on_call = on_call
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self.callers: list[Caller] = []

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        handlers: dict[int, Callable[[], None]] = {self._listener.fileno(): self._on_connect}
        handlers.update((c.fileno(), c.read) for c in self.callers if not c.ended)
        return handlers

    def close(self) -> None:
        self._listener.close()
        for caller in self.callers:
            caller.close()

    def _on_connect(self) -> None:
        connection, _ = self._listener.accept()
        self.callers.append(Caller(connection, self._on_text))

    def _on_text(self, caller: Caller, text: bytes) -> None:
        self._on_call(caller, parse_plain(text, self._kind))
