"""Doors of a slot: to mpirun's agents, the daemons that they ask for, and the ranks' shims."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import LaunchError
from ...typed_json import Message, parse_plain
from ..protocol.channel import Channel, Handshake, connect
from ..protocol.listener import Listener
from ..protocol.messages import StartDaemon
from ..protocol.processes import ChildOutput
from ..protocol.topology import Node

_INTERFACE = "prte_if_include"
# The other slot may still wait for Spark, which polls once a second.
SEND_TIMEOUT = 15.0
# Seconds that slot 0, connected and proven, may take to send its order.
_ORDER_TIMEOUT = 5.0
# Takes a host and the command of its daemon. It starts no program: on hundreds of hosts, that would
# be most of the start (benchmarks/growth.py). It opens the FIFO as a reader, too (<>), so that it
# does not wait for a slot that is gone.
_AGENT = """\
host=$1
shift
printf '%s' "$*" > "${0%/*}/command-$host" && echo "$host" 1<> "${0%/*}/hosts"
"""


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
        channel, messages = handshake.channel(StartDaemon), []
        connection.settimeout(_ORDER_TIMEOUT)
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                messages += channel.feed(data)
        for order in messages:  # not above: the daemon may fail to start with an OSError, too
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


class Agent:
    """The shell script that mpirun calls in place of ssh, and a FIFO into which it writes hosts.

    Args:
        folder: private; mpirun must be started in it.
        on_call: takes the name of a host, and the shell command that starts its daemon.
    """

    # By way of the shell, as nothing in a temporary folder may be executed (noexec), and relative:
    # mpirun splits the command at blanks, and the folder's path may hold some.
    COMMAND = "/bin/sh agent/agent.sh"

    def __init__(self, folder: Path, on_call: Callable[[str, str], None]) -> None:
        self._folder = folder / "agent"
        self._on_call = on_call
        self._folder.mkdir(mode=0o700)
        (self._folder / "agent.sh").write_text(_AGENT)
        hosts = self._folder / "hosts"
        os.mkfifo(hosts, 0o600)
        # Open for writing, too: it would end with each of its writers.
        stream = os.fdopen(os.open(hosts, os.O_RDWR | os.O_CLOEXEC), "rb", 0)
        self._output = ChildOutput(stream, 0, self._on_hosts)

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        return self._output.handlers()

    def close(self) -> None:
        self._output.close()

    def _on_hosts(self, hosts: list[str]) -> None:
        for host in hosts:
            command = (self._folder / f"command-{host}").read_bytes()
            self._on_call(host, os.fsdecode(command))


class Shim:
    """A rank's shim, which has connected.

    Args:
        connection: its connection.
        on_identity: takes what it sends.
    """

    def __init__(
        self, connection: socket.socket, on_identity: Callable[[Shim, MpiIdentity], None]
    ) -> None:
        self._connection = connection
        self._on_identity = on_identity
        self._received = b""
        self.ended = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def release(self, code: int) -> None:
        """Let the shim end with ``code``."""
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
            self._on_identity(self, parse_plain(self._received, MpiIdentity))


class ShimDoor:
    """Unix socket for a rank's shim.

    Args:
        path: of the socket, in a private directory.
        on_identity: takes each shim that connects, and what MPI gave it.
    """

    def __init__(self, path: Path, on_identity: Callable[[Shim, MpiIdentity], None]) -> None:
        self.path = str(path)
        self._on_identity = on_identity
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._shims: list[Shim] = []

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        handlers: dict[int, Callable[[], None]] = {self._listener.fileno(): self._on_connect}
        handlers.update((shim.fileno(), shim.read) for shim in self._shims if not shim.ended)
        return handlers

    def close(self) -> None:
        self._listener.close()
        for shim in self._shims:
            shim.close()

    def _on_connect(self) -> None:
        connection, _ = self._listener.accept()
        self._shims.append(Shim(connection, self._on_identity))
