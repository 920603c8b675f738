"""How the command of a host's MPI daemon gets from slot 0 to the slot that leads the host."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Callable

from ...errors import LaunchError
from ..shared.channel import NONCE_BYTES, ChannelError, FrameCodec, Message, new_nonce
from ..shared.network import family_of
from ..shared.topology import Node
from .driver_link import receive_exactly

_INTERFACE = "prte_if_include"
# The other slot may still wait for Spark, which tells the slots of each other once a second.
SEND_TIMEOUT = 15.0


class NodeDoor:
    """A TCP port, on the chosen interface only, that takes authenticated messages of slot 0.

    A peer that does not hold the run's key is dropped; none is ever waited for.

    Args:
        address: IP address to listen at.
        key: the run's secret.
        on_message: takes each message.
    """

    def __init__(
        self, address: str, key: bytes, on_message: Callable[[Message | bytes], None]
    ) -> None:
        self._key = key
        self._on_message = on_message
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self._peers: dict[int, _Peer] = {}
        self.port: int = self._listener.getsockname()[1]

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        if self._listener.fileno() < 0:
            return {}
        handlers: dict[int, Callable[[], None]] = {self._listener.fileno(): self._on_connect}
        for number, peer in self._peers.items():
            handlers[number] = peer.read
        return handlers

    def close(self) -> None:
        self._listener.close()
        for peer in list(self._peers.values()):
            peer.close()

    def _on_connect(self) -> None:
        connection, _ = self._listener.accept()
        peer = _Peer(connection, self._key, self._on_message, self._drop)
        self._peers[connection.fileno()] = peer
        peer.greet()

    def _drop(self, number: int) -> None:
        self._peers.pop(number, None)


class _Peer:
    """One connection to the door, which may be a stranger's."""

    def __init__(
        self,
        connection: socket.socket,
        key: bytes,
        on_message: Callable[[Message | bytes], None],
        on_close: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._key = key
        self._on_message = on_message
        self._on_close = on_close
        self._nonce = new_nonce()
        self._received = b""
        self._codec: FrameCodec | None = None
        connection.setblocking(False)

    def greet(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(self._nonce)

    def read(self) -> None:
        try:
            data = self._connection.recv(65536)
            if not data:
                raise ConnectionError("closed by the peer")
            for message in self._messages(data):
                self._on_message(message)
        except BlockingIOError:
            return
        except (OSError, ChannelError):
            self.close()

    def close(self) -> None:
        self._on_close(self._connection.fileno())
        self._connection.close()

    def _messages(self, data: bytes) -> list[Message | bytes]:
        if self._codec is not None:
            return self._codec.feed(data)
        self._received += data
        if len(self._received) < NONCE_BYTES:
            return []
        answer, rest = self._received[:NONCE_BYTES], self._received[NONCE_BYTES:]
        self._codec = FrameCodec(self._key, self._nonce, answer, is_server=True)
        return self._codec.feed(rest)


def send_to_node(node: Node, key: bytes, message: Message) -> None:
    """Send ``message`` to the slot that leads ``node``.

    Raises:
        LaunchError: it cannot be reached.
    """
    try:
        with socket.create_connection((node.address, node.port), SEND_TIMEOUT) as connection:
            server_nonce = receive_exactly(connection, NONCE_BYTES)
            nonce = new_nonce()
            codec = FrameCodec(key, server_nonce, nonce, is_server=False)
            connection.sendall(nonce + codec.encode(message))
            # The peer closes when it has read everything, or drops what it does not believe.
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

    The program itself is left out, and so is the network interface: each host has its own,
    perhaps at another path or by another name.
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
        place = arguments.index(_INTERFACE)
        del arguments[place - 1 : place + 2]  # --prtemca NAME VALUE
    return arguments
