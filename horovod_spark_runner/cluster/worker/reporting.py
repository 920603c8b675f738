"""Report from code on a rank to the driver while it runs.

Reports are advice, not data: one that cannot be sent is dropped, never waited for.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from ...typed_json import to_json
from ..protocol.messages import Alive, Notice, RankReport

# At most one word of progress in so many seconds.
PROGRESS_SECONDS = 0.5
_last_progress = 0.0
_lock = threading.Lock()


class Sink(Protocol):
    """Takes reports, a line of JSON each; the connection to a slot, say."""

    def sendall(self, data: bytes, /) -> None: ...


_sink: Sink | None = None


def connect(sink: Sink | None) -> None:
    """Send this process's reports to ``sink``; ``None`` drops them, as outside a run."""
    global _sink
    _sink = sink


def report_progress() -> None:
    """Tell the driver that this rank gets on; for functions run with a ``stall_timeout``.

    A function of your own on a `HorovodRunner` calls it where it has done a step of its work, as
    often as it likes; a training does so by itself. What is printed is no progress: Horovod prints,
    too, while it waits for a rank that never comes. Outside a run it does nothing.
    """
    global _last_progress
    now = time.monotonic()
    if now - _last_progress >= PROGRESS_SECONDS:
        _last_progress = now
        send(Alive())


def notify(text: str, *, warn: bool = True) -> None:
    """Tell whoever called of something that does not end the run.

    Args:
        text: what there is to know.
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
        except OSError:  # the slot is gone or stuck, and half a line may have been sent
            _sink = None
