"""The full log of one rank, in shared storage."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import IO

from ..storage.filesystem import Location


class RankLog:
    """Appends a rank's output to ``FOLDER/rank-00000.log``.

    On a file system the lines are there as they come; object stores take whole objects only, so
    there the log is put when the rank has ended. A log that cannot be written never harms the run.

    Args:
        folder: where the logs of the run go; ``None`` to keep none.
        spool: private folder, for logs bound for an object store.
    """

    def __init__(self, folder: str | None, spool: Path) -> None:
        self._folder = None if folder is None else Location(folder)
        self._spool = spool / "log"
        self._early: list[str] = []
        self._stream: IO[str] | None = None
        self._target: Location | None = None

    def open(self, rank: int, title: str) -> None:
        """Start writing, now that the rank is known; ``title`` goes before what was said so far."""
        if self._folder is None:
            return
        self._target = self._folder.join(f"rank-{rank:05d}.log")
        path = self._spool
        with contextlib.suppress(OSError):
            if self._target.is_local:
                self._folder.make_folder()
                path = Path(str(self._target))
            self._stream = path.open("a", encoding="utf-8")
        moment = time.strftime("%Y-%m-%d %H:%M:%S %z")
        early, self._early = self._early, []
        self.write([f"--- {moment} {title}", *early])

    def write(self, lines: list[str]) -> None:
        """Append ``lines``."""
        if self._stream is None:
            if self._folder is not None and self._target is None:
                self._early += lines
            return
        try:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
        except OSError:  # a full disk, say
            self._discard()

    def close(self) -> None:
        if self._stream is None:
            return
        self._discard()
        assert self._target is not None
        if not self._target.is_local:
            # Any error of any storage: the log is not worth failing for.
            with contextlib.suppress(Exception):
                data = self._target.read_bytes() if self._target.exists() else b""
                self._target.write_bytes(data + self._spool.read_bytes())

    def _discard(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
        self._stream = None
