"""How the command of a host's MPI daemon gets from slot 0 to the slot that leads the host."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import socket
from collections.abc import Callable

from ...errors import LaunchError
from ..shared.channel import Channel, ChannelError, connect
from ..shared.messages import StartDaemon
from ..shared.network import family_of
from ..shared.topology import Node
from ..shared.typed_json import Message

_INTERFACE = "prte_if_include"
# The other slot may still wait for Spark, which tells the slots of each other once a second.
SEND_TIMEOUT = 15.0


class NodeDoor:
    """A TCP port, on the chosen interface only, that takes authenticated messages of slot 0.

    A peer that does not hold the run's key is dropped; none is ever waited for. Of one that does,
    what is no order is raised as a `MessageError`.

    Args:
        address: IP address to listen at.
        key: the run's secret.
        on_order: takes what slot 0 wants.
    """

    def __init__(self, address: str, key: bytes, on_order: Callable[[StartDaemon], None]) -> None:
        self._key = key
        self._on_order = on_order
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self._peers: dict[socket.socket, Channel[StartDaemon]] = {}
        self.port: int = self._listener.getsockname()[1]

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        if self._listener.fileno() < 0:
            return {}
        handlers: dict[int, Callable[[], None]] = {self._listener.fileno(): self._on_connect}
        for connection, channel in self._peers.items():
            handlers[connection.fileno()] = functools.partial(self._read, connection, channel)
        return handlers

    def close(self) -> None:
        self._listener.close()
        for connection in list(self._peers):
            self._drop(connection)

    def _on_connect(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        channel = Channel(self._key, StartDaemon, listened=True)
        self._peers[connection] = channel
        with contextlib.suppress(OSError):
            connection.send(channel.nonce)

    def _read(self, connection: socket.socket, channel: Channel[StartDaemon]) -> None:
        try:
            data = connection.recv(65536)
            orders = channel.feed(data)
        except BlockingIOError:
            return
        except (OSError, ChannelError):
            self._drop(connection)
            return
        for order in orders:
            if isinstance(order, StartDaemon):
                self._on_order(order)
        if not data:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._peers.pop(connection, None)
        connection.close()


def send_to_node(node: Node, key: bytes, order: StartDaemon) -> None:
    """Send ``order`` to the slot that leads ``node``.

    Raises:
        LaunchError: it cannot be reached.
    """
    channel: Channel[Message] = Channel(key, listened=False)  # of no kind: nothing is answered
    try:
        with connect((node.address, node.port), SEND_TIMEOUT, channel) as connection:
            connection.sendall(channel.encode(order))
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
        index = arguments.index(_INTERFACE)
        del arguments[index - 1 : index + 2]  # --prtemca NAME VALUE
    return arguments
