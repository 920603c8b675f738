"""Messages on their way from the thread that receives them to the driver's own."""

from __future__ import annotations

import contextlib
import queue
import threading

from ..protocol.messages import Dropped, Log, Told, by_driver

# Characters of log lines that may wait to be shown. Above it they are dropped, and counted: a slow
# terminal must neither slow the run nor fill the driver's memory.
MAX_LOG_CHARACTERS = 4 * 1024 * 1024


class Mailbox:
    """A queue that holds every message, but of log lines only so many.

    Args:
        limit: characters of log lines that may wait.
    """

    def __init__(self, limit: int = MAX_LOG_CHARACTERS) -> None:
        self._limit = limit
        self._messages: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._dropped = 0

    def put(self, told: Told) -> None:
        """Take a message, or count its lines if too many wait."""
        if isinstance(told.message, Log):
            size = _characters(told.message)
            with self._lock:
                if self._waiting + size > self._limit:
                    self._dropped += len(told.message.lines)
                    return
                self._waiting += size
        self._messages.put(told)

    def wake(self) -> None:
        """Have who waits for a message look up now."""
        self._messages.put(None)

    def get(self, timeout: float) -> Told:
        """Wait for a message and return it.

        Raises:
            queue.Empty: there was none for ``timeout`` seconds, or it was time to look up.
        """
        told = self._messages.get(timeout=timeout)
        if told is None:
            raise queue.Empty
        self._took(told)
        return told

    def drain(self) -> list[Told]:
        """Return what is there now; what comes meanwhile is for the next time."""
        messages = []
        with contextlib.suppress(queue.Empty):
            for _ in range(self._messages.qsize()):
                told = self._messages.get_nowait()
                if told is not None:
                    self._took(told)
                    messages.append(told)
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            messages.append(by_driver(Dropped(dropped)))
        return messages

    def empty(self) -> bool:
        return self._messages.empty()

    def _took(self, told: Told) -> None:
        if isinstance(told.message, Log):
            with self._lock:
                self._waiting -= _characters(told.message)


def _characters(log: Log) -> int:
    return sum(map(len, log.lines))
