"""TCP listener that admits only holders of the run's key, and bounds the cost of strangers.

Until a peer has proven that it holds the key, no more than the 64 bytes of its handshake are read,
it is one of a few, and its time is short. Of too many, the oldest is dropped: a holder of the key
needs a single round trip, and tries again.
"""

from __future__ import annotations

import resource
import selectors
import socket
import time
from collections.abc import Callable

from .channel import NONCE_BYTES, PROOF_BYTES, Handshake
from .network import family_of

# Peers without a proof at a time, and seconds that each of them has.
MAX_UNPROVEN = 64
PROOF_TIMEOUT = 5.0
# Descriptors reserved for the files of this process: a lease that cannot be renewed is lost.
RESERVED_DESCRIPTORS = 32
_BACKLOG = 4096
# Seconds to pause when the system has no descriptor or memory for a new connection.
_PAUSE = 0.1


class _Unproven:
    """Connection whose peer has not yet proven that it holds the key."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.handshake = Handshake(key, listened=True)
        self.since = time.monotonic()
        self._received = b""
        connection.send(self.handshake.nonce)

    def receive(self) -> bool:
        """Read arrived data; return whether the handshake is complete, and valid.

        Raises:
            OSError: the peer has disconnected, or does not hold the key.
        """
        data = self.connection.recv(NONCE_BYTES + PROOF_BYTES - len(self._received))
        if not data:
            raise ConnectionError("closed by the peer")
        self._received += data
        if len(self._received) < NONCE_BYTES + PROOF_BYTES:
            return False
        proof = self.handshake.derive_keys(self._received[:NONCE_BYTES])
        self.handshake.verify(self._received[NONCE_BYTES:])
        self.connection.send(proof)
        return True


class Listener:
    """Listens at one address and passes on connections whose peers hold the key.

    Wait until ``fileno()`` can be read, then call `handle`; call it once a second, too.

    Args:
        address: IP address or name of this machine to listen at.
        key: the run's secret.
        on_peer: takes each connection, which does not block, and its side of the handshake.
        port: to listen at; 0 for one that the system chooses.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        on_peer: Callable[[socket.socket, Handshake], None],
        port: int = 0,
    ) -> None:
        self._key = key
        self._on_peer = on_peer
        self._socket = socket.create_server(
            (address, port), family=family_of(address), backlog=_BACKLOG
        )
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._selector = selectors.EpollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._unproven: dict[socket.socket, _Unproven] = {}  # the oldest first

    def fileno(self) -> int:
        """Return the descriptor that can be read when there is something to handle."""
        return self._selector.fileno()

    def handle(self, timeout: float = 0.0) -> None:
        """Read arrived data, drop late peers, then accept one connection.

        Args:
            timeout: seconds to wait for something to arrive.
        """
        ready = {key.fileobj for key, _ in self._selector.select(timeout)}
        limit = time.monotonic() - PROOF_TIMEOUT
        proven: list[_Unproven] = []
        for connection, peer in list(self._unproven.items()):
            if connection in ready:
                self._receive(peer, proven)
            if connection in self._unproven and peer.since < limit:
                self._drop(peer)
        if self._socket in ready:
            self._accept()
        for peer in proven:  # last, as the owner may close this listener now
            self._on_peer(peer.connection, peer.handshake)

    def close(self) -> None:
        """Stop listening, and drop peers without a proof; safe to call again."""
        self._socket.close()
        for connection in self._unproven:
            connection.close()
        self._unproven.clear()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:  # it has disconnected
            return
        except OSError:  # no descriptor, or no memory: those who wait stay in the queue
            if not self._drop_oldest():
                time.sleep(_PAUSE)
            return
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        scarce = 0 <= allowed - RESERVED_DESCRIPTORS <= connection.fileno()  # -1: no limit
        try:
            if len(self._unproven) >= MAX_UNPROVEN or scarce:
                with connection:
                    if not self._drop_oldest():
                        return
                    connection = connection.dup()  # takes the descriptor that has become free
            peer = _Unproven(connection, self._key)
        except OSError:  # it has disconnected
            connection.close()
            return
        self._unproven[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, peer: _Unproven, proven: list[_Unproven]) -> None:
        try:
            if peer.receive():
                self._forget(peer)
                proven.append(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)

    def _drop_oldest(self) -> bool:
        """Drop the oldest peer without a proof; return whether there was one."""
        oldest = next(iter(self._unproven.values()), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, peer: _Unproven) -> None:
        self._forget(peer)
        peer.connection.close()

    def _forget(self, peer: _Unproven) -> None:
        del self._unproven[peer.connection]
        self._selector.unregister(peer.connection)
