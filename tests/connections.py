"""What tests do to the driver's connections."""

from __future__ import annotations

import contextlib
import socket

from horovod_spark_runner.cluster.driver.control_server import ControlServer


def cut(server: ControlServer) -> None:
    """Close all connections, as a network that drops them would."""
    for peer in server._current():
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_RDWR)
