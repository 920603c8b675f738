"""Writes that fail because a test asks for it; see `horovod_spark_runner.testing`."""

from __future__ import annotations

import errno
import threading
import time


class WriteTrouble:
    """Lets writes of this process fail, whichever of its threads they are made in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = False
        self._until = 0.0

    def begin(self, seconds: float) -> None:
        """Let the next write fail, and all of the ``seconds`` from now on."""
        with self._lock:
            self._next, self._until = True, time.monotonic() + seconds

    def end(self) -> None:
        """Let writes succeed again."""
        with self._lock:
            self._next, self._until = False, 0.0

    def check(self, path: str) -> None:
        """Fail if the write to ``path`` that is about to be made is to fail.

        Raises:
            OSError: it is.
        """
        with self._lock:
            fails = self._next or time.monotonic() < self._until
            self._next = False
        if fails:
            raise OSError(errno.EIO, "a fault of storage that a test has asked for", path)


WRITES = WriteTrouble()
