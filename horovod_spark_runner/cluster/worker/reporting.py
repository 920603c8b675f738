"""Reports from code on a rank to the driver while it runs.

Reports are advice, not data: one that cannot be sent is dropped, never waited for.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

from ...typed_json import to_json
from ..protocol.command import ATTEMPT
from ..protocol.messages import Alive, Notice, RankReport

# Minimum of seconds between two reports of progress.
_PROGRESS_SECONDS = 0.5
_last_progress = 0.0
_lock = threading.Lock()


class _Sink(Protocol):
    """Takes reports, one line of JSON each; the connection to a slot, for example."""

    def sendall(self, data: bytes, /) -> None: ...


_sink: _Sink | None = None


def connect(sink: _Sink | None) -> None:
    """Send this process's reports to ``sink``; ``None`` drops them, as outside a run."""
    global _sink
    _sink = sink


def attempt() -> int:
    """Return the number of this attempt, from 1: on a rank, how often the run has begun.

    A function that `HorovodRunner` restarts resumes from what it has saved itself.
    """
    return int(os.environ.get(ATTEMPT, "1"))


def report_progress() -> None:
    """Report progress of this rank to the driver; for functions run with a ``stall_timeout``.

    Call it in your function on a `HorovodRunner` after each step of its work, as often as you like;
    a training does so by itself. Printed output does not count as progress: Horovod prints, too,
    while it waits for a rank that never comes. Outside a run it does nothing.
    """
    global _last_progress
    now = time.monotonic()
    if now - _last_progress >= _PROGRESS_SECONDS:
        _last_progress = now
        send(Alive())


def notify(text: str, *, warn: bool = True) -> None:
    """Send a notice to the user that does not end the run.

    Args:
        text: the notice.
        warn: whether it is a warning, which is shown also where progress and logs are not.
    """
    send(Notice(text, warn))


def send(report: RankReport) -> None:
    """Send ``report``; does nothing outside a run."""
    global _sink
    data = to_json(report).encode() + b"\n"
    with _lock:
        if _sink is None:
            return
        try:
            _sink.sendall(data)
        except OSError:  # the slot has ended or is stuck, and half a line may have been sent
            _sink = None
