"""Full log of one rank, in shared storage."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from ...storage.filesystem import Location

# Pieces of output that may wait for storage. Above it they are dropped, and counted: the run does
# not wait.
_MAX_WAITING = 20_000
# Seconds that storage may take for the last lines when the rank has ended.
_CLOSE_SECONDS = 10.0


def _location(folder: str | os.PathLike[str]) -> Location:
    # At use: it loads the clients of all storage there is, and most runs keep no logs.
    from ...storage.filesystem import Location

    return Location(folder)


class RankLog:
    """Appends a rank's output to ``FOLDER/rank-00000.log``, on its own thread.

    On a file system lines appear at once; object stores take whole objects only, so there the log
    is written when the rank has ended. A log that cannot be written, or storage that hangs, never
    harms the run.

    Args:
        folder: folder of the run's logs; ``None`` for no logs.
        spool: private folder, for logs bound for an object store.
        max_waiting: pieces of output that may wait for storage.
        close_seconds: seconds that storage may take for the last lines when the rank has ended.

    Attributes:
        problem: why the log, or the rest of it, is lost; ``""`` if nothing is wrong.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        spool: Path,
        *,
        max_waiting: int = _MAX_WAITING,
        close_seconds: float = _CLOSE_SECONDS,
    ) -> None:
        self._folder = None if folder is None else _location(folder)
        self._spool = spool / "log"
        self._early: list[str] = []
        self._waiting: queue.Queue[list[str] | None] = queue.Queue(max_waiting)
        self._close_seconds = close_seconds
        self._dropped = 0
        self.problem = ""
        self._closed = False
        self._thread: threading.Thread | None = None

    def open(self, rank: int, title: str) -> None:
        """Start writing, once the rank is known: ``title``, then the output so far."""
        if self._folder is None:
            return
        moment = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._waiting.put([f"--- {moment} {title}", *self._early])
        self._early = []
        target = self._folder.join(f"rank-{rank:05d}.log")
        self._thread = threading.Thread(
            target=self._write_all, args=(target,), name="hsr-rank-log", daemon=True
        )
        self._thread.start()

    def write(self, lines: list[str]) -> None:
        """Append ``lines``; does not wait."""
        if self._folder is None:
            return
        if self._thread is None:
            self._early += lines
            return
        try:
            self._waiting.put_nowait(lines)
        except queue.Full:
            self._dropped += len(lines)

    def end(self) -> None:
        """Write the lines that wait, and no more; does not wait."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # the thread ends once it has written them
            self._waiting.put_nowait(None)

    def close(self) -> None:
        """Wait until the lines are written, if storage takes them in time."""
        if self._thread is None:
            return
        self.end()
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            self._give_up(TimeoutError("the storage does not answer"))

    def _write_all(self, target: Location) -> None:
        stream, reported = self._open(target), 0
        while (lines := self._next()) is not None:
            if self._dropped > reported:
                dropped, reported = self._dropped - reported, self._dropped
                lines = [f"--- {dropped:,} lines were dropped: the storage was too slow", *lines]
            if stream is not None and not self._append(stream, lines):
                with contextlib.suppress(OSError):
                    stream.close()
                stream = None
        if stream is None:
            return
        with contextlib.suppress(OSError):
            stream.close()
        if not target.is_local:
            try:
                data = target.read_bytes() if target.exists() else b""
                target.write_bytes(data + self._spool.read_bytes())
            except Exception as error:  # of any storage: the log is not worth failing for
                self._give_up(error)

    def _next(self) -> list[str] | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._waiting.get(timeout=1.0)
            if self._closed:  # while the storage hung, and the queue was full
                return None

    def _open(self, target: Location) -> IO[str] | None:
        path = Path(str(target)) if target.is_local else self._spool
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a", encoding="utf-8")
        except OSError as error:
            self._give_up(error)
            return None

    def _append(self, stream: IO[str], lines: list[str]) -> bool:
        try:
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()
        except OSError as error:  # a full disk, for example
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        self.problem = f"the full logs of ranks cannot be kept in {self._folder}: {error!r}"
