"""How code on a rank tells the driver something while it runs.

Reports are advice, not data: one that cannot be sent is dropped, never waited for.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

_slot: socket.socket | None = None
_lock = threading.Lock()


def connect(slot: socket.socket) -> None:
    """Send this process's reports to ``slot``."""
    global _slot
    slot.settimeout(1.0)
    _slot = slot


def notify(text: str, *, warn: bool = True) -> None:
    """Tell whoever called of something that does not end the run.

    Args:
        text: what there is to know.
        warn: whether it is a warning, which is shown also where progress and logs are not.
    """
    send({"type": "notice", "text": text, "warn": warn})


def send(report: dict[str, Any]) -> None:
    """Send ``report``, a JSON object with a ``type``; does nothing outside a run."""
    global _slot
    data = json.dumps(report).encode() + b"\n"
    with _lock:
        if _slot is None:
            return
        try:
            _slot.sendall(data)
        except OSError:  # the slot is gone or stuck, and half a line may have been sent
            _slot = None
