"""Horovod's timeline, begun and ended while ranks train. Knows no framework."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

# How long Horovod's thread may take to write the rest, and how long its file then rests.
_PATIENCE, _REST = 5.0, 0.2
# Bytes of the file's end in which its last event ends.
_TAIL = 4096


class Basics(Protocol):
    """What Horovod offers for each framework alike."""

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None: ...

    def stop_timeline(self) -> None: ...


class Timeline:
    """One timeline of this rank, which is to be rank 0.

    Args:
        basics: Horovod, of any framework.
    """

    def __init__(self, basics: Basics) -> None:
        self._basics = basics
        self._file: Path | None = None

    def start(self, file: Path) -> None:
        """Begin to record; Horovod does with its next cycle."""
        self._file = file
        self._basics.start_timeline(str(file))

    def stop(self) -> None:
        """End it, and make its file whole: Horovod leaves the list open at its end."""
        assert self._file is not None
        self._basics.stop_timeline()
        self._await_rest(self._file)
        _close_list(self._file)

    def _await_rest(self, file: Path) -> None:
        deadline = time.monotonic() + _PATIENCE
        size, since = -1, time.monotonic()
        while time.monotonic() < deadline:
            now = file.stat().st_size if file.exists() else -1
            if now != size:
                size, since = now, time.monotonic()
            elif size > 0 and time.monotonic() - since >= _REST:
                return
            time.sleep(0.01)


def _close_list(file: Path) -> None:
    """End the list in a file of any size, if it has no end."""
    with file.open("r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        begin = stream.seek(max(0, size - _TAIL))
        tail = stream.read().rstrip().rstrip(b",")
        if not tail.endswith(b"]"):
            stream.seek(begin + len(tail))
            stream.write(b"\n]\n")
            stream.truncate()
