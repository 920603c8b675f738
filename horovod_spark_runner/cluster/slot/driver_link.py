"""A slot's connection to the driver: never waited for, never fatal."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...errors import LaunchError
from ..protocol.channel import MAX_DATA_BYTES, RETRY_PAUSES, Channel, connect
from ..protocol.messages import INSTRUCTIONS, Instruction, Told

CONNECT_TIMEOUT = 5.0
RECONNECT_TIMEOUT = 1.0
# How long a large call or result may make no headway at all.
TRANSFER_TIMEOUT = 60.0
# What may wait to be sent. Above it log lines are dropped: a slow driver must not slow training.
MAX_PENDING_BYTES = 1024 * 1024


class DriverLink:
    """Sends what it can to the driver; everything is dropped quietly once the link is lost.

    Args:
        address: the driver's host and port.
        key: the run's secret.
        pauses: seconds between tries to connect at the start.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes, pauses: Sequence[float] = RETRY_PAUSES
    ) -> None:
        self._socket: socket.socket | None = None
        self._channel: Channel[Instruction]  # of each connection anew
        self._pending = bytearray()
        self._early: list[Instruction] = []
        self._address = address
        self._key = key
        self._problem = ""
        self._connect(CONNECT_TIMEOUT, pauses)

    def check(self) -> None:
        """Check that the driver was reached.

        Raises:
            LaunchError: it was not.
        """
        if self._socket is None:
            host, port = self._address
            raise LaunchError(
                f"{socket.gethostname()} cannot reach the driver at {host} port {port} "
                f"({self._problem}): executors must be able to connect to it. Behind a firewall, "
                "open the port that spark.horovod.controlPort names; where the driver has several "
                "addresses, name the right one in spark.driver.host"
            )

    def reconnect(self) -> bool:
        """Try once to mend a lost connection; return whether it was lost and is there again."""
        if self._socket is not None:
            return False
        self._connect(RECONNECT_TIMEOUT, ())
        return self._socket is not None

    def _connect(self, timeout: float, pauses: Sequence[float]) -> None:
        try:
            self._socket, self._channel = connect(
                self._address, timeout, self._key, *INSTRUCTIONS, pauses=pauses
            )
        except OSError as error:
            self._problem = str(error)
        else:
            self._socket.setblocking(False)

    def fileno(self) -> int | None:
        """Return the descriptor to watch for messages, or ``None`` once the link is lost."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def local_address(self) -> str | None:
        """The address of this host on the route to the driver."""
        return None if self._socket is None else self._socket.getsockname()[0]

    def send(self, told: Told, *, droppable: bool = False) -> bool:
        """Queue a message; return whether it was.

        A droppable one is left out while too much is waiting.
        """
        if self._socket is None or (droppable and len(self._pending) > MAX_PENDING_BYTES):
            return False
        self._pending += self._channel.encode(told)
        self.flush()
        return True

    def flush(self) -> None:
        """Send what can be sent without waiting."""
        while self._socket is not None and self._pending:
            try:
                sent = self._socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            del self._pending[:sent]

    def receive(self) -> list[Instruction]:
        """Return the messages that have arrived, without waiting.

        Raises:
            MessageError: the driver said what no slot expects.
        """
        early, self._early = self._early, []
        if self._socket is None:
            return early
        try:
            data = self._socket.recv(65536)
            if data:
                return early + [m for m in self._channel.feed(data) if not isinstance(m, bytes)]
        except BlockingIOError:
            return early
        except OSError:
            pass
        self.close()
        return early

    def fetch(self, wanted: Told, path: Path, size: int) -> None:
        """Ask for the run's call and write it, ``size`` bytes, to ``path``; waits for it.

        Raises:
            LaunchError: it cannot be had.
        """
        self.send(wanted)
        try:
            with path.open("wb") as stream:
                while stream.tell() < size:
                    for message in self._wait():
                        if isinstance(message, bytes):
                            stream.write(message)
                        else:
                            self._early.append(message)
        except OSError as error:
            raise LaunchError(
                f"the function and its arguments, {size:,} bytes, could not be fetched from the "
                f"driver at {self._address[0]} port {self._address[1]}: {error}"
            ) from error

    def _wait(self) -> list[Instruction | bytes]:
        if self._socket is None:
            raise ConnectionError("no connection to the driver")
        self._socket.settimeout(TRANSFER_TIMEOUT)
        self._socket.sendall(self._pending)
        self._pending.clear()
        data = self._socket.recv(MAX_DATA_BYTES)
        self._socket.setblocking(False)
        if not data:
            raise ConnectionError("the driver closed the connection")
        return self._channel.feed(data)

    def send_file(self, header: Told, path: Path) -> bool:
        """Send ``header``, then the contents of ``path``; waits. Return whether it was sent."""
        if self._socket is None:
            return False
        self._socket.settimeout(TRANSFER_TIMEOUT)
        try:
            self._socket.sendall(self._pending + self._channel.encode(header))
            self._pending.clear()
            with path.open("rb") as stream:
                while data := stream.read(MAX_DATA_BYTES):
                    self._socket.sendall(self._channel.encode_data(data))
            self._socket.setblocking(False)
        except OSError:
            self.close()
            return False
        return True

    def drain(self, timeout: float) -> None:
        """Send what is waiting, for at most about ``timeout`` seconds, then close."""
        if self._socket is not None:
            self._socket.settimeout(timeout)
            with contextlib.suppress(OSError):
                self._socket.sendall(self._pending)
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._pending.clear()


@contextlib.contextmanager
def meanwhile(action: Callable[[], object], *, every: float) -> Iterator[None]:
    """Call ``action`` every so many seconds while the calling thread waits for something else."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every):
            action()

    thread = threading.Thread(target=repeat, name="hsr-meanwhile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # messages carry their number: one sender at a time
