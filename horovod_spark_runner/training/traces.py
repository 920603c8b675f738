"""Optional traces of a training: Horovod's timeline, and profiles of steps.

Rank 0 records them into a folder of its own, and puts them into the run directory once they are
whole. A failure to record is reported, and the training continues.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..cluster.worker.reporting import notify
from ..errors import ModelError
from ..storage.contents import Contents, FilePart
from .spec import TrainingSpec

_PROFILE = "profile"


class Tracer(Protocol):
    """Recorder of a framework's traces."""

    def start_timeline(self, file: Path) -> None:
        """Begin Horovod's timeline."""
        ...

    def stop_timeline(self) -> None:
        """End it; its file is whole once this returns."""
        ...

    def start_profile(self) -> None:
        """Begin to profile this rank."""
        ...

    def stop_profile(self, folder: Path, name: str) -> None:
        """End it.

        Args:
            folder: where TensorBoard is to find it.
            name: of this profile.
        """
        ...


class Traces:
    """The traces of one attempt, on rank 0; on the others, nothing.

    Args:
        spec: the training.
        rank: this rank.
        tracer: records; ``None`` if the framework cannot.
        say: tells whoever called what went wrong.

    Raises:
        ModelError: traces are asked for, and the framework has none.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        rank: int,
        tracer: Tracer | None,
        say: Callable[[str], None] = notify,
    ) -> None:
        options = spec.config.checkpoints
        if tracer is None and (options.timeline or options.profile_steps):
            raise ModelError(
                f"timeline and profile_steps: engine {spec.engine!r} records no traces; leave "
                "them out"
            )
        self._tracer = tracer if rank == 0 else None
        self._timeline = options.timeline
        self._first, self._last = options.profile_steps or (0, -1)
        self._directory = spec.directory
        self._say = say
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tried = self._recording = False
        self._profiling = self._profiled = False

    def before(self, step: int) -> None:
        """Begin the recordings that are due.

        Args:
            step: steps of the run that are done; the next one follows.
        """
        tracer = self._tracer
        if tracer is None:
            return
        if self._timeline and not self._tried:
            self._tried = True
            name = f"timeline-{step:08d}.json"
            self._recording = self._try(lambda: tracer.start_timeline(self._place / name))
        if not self._profiled and self._first - 1 <= step < self._last:
            self._profiled = True
            # A profile that is not begun is not ended: it may be one that a callback has begun.
            self._profiling = self._try(tracer.start_profile)

    def after(self, step: int) -> None:
        """End the recordings that are complete.

        Args:
            step: steps of the run that are done; anything may follow.
        """
        if self._profiling and step >= self._last:
            self._end_profile()

    def close(self) -> None:
        """End open recordings, and report those that had nothing to record."""
        if self._tracer is None:
            return
        if self._profiling:
            self._end_profile()
        if self._last > 0 and not self._profiled:
            self._say(
                f"profile_steps=({self._first}, {self._last}): this attempt trained none of these "
                "steps, so nothing was profiled"
            )
        if self._recording:
            self._recording = False
            self._try(self._end_timeline)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def _place(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="traces-", ignore_cleanup_errors=True)
        return Path(self._folder.name)

    def _end_timeline(self) -> None:
        assert self._tracer is not None
        self._tracer.stop_timeline()
        self._put(self._place)

    def _end_profile(self) -> None:
        self._profiling = False
        self._try(self._write_profile)

    def _write_profile(self) -> None:
        assert self._tracer is not None
        with tempfile.TemporaryDirectory(prefix="profile-", ignore_cleanup_errors=True) as name:
            self._tracer.stop_profile(Path(name, _PROFILE), f"step-{self._first:08d}")
            self._put(Path(name))

    def _put(self, folder: Path) -> None:
        """Put the files of a folder into the run directory, beside the event files."""
        if not self._directory.is_held():
            return
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            place = self._directory.events
            *parents, last = file.relative_to(folder).parts
            for part in parents:
                place = place.join(part)
            place.make_folder()
            # A timeline grows with every step.
            whole = FilePart(str(file), 0, file.stat().st_size)
            place.join(last).write_bytes(Contents(whole))

    def _try(self, act: Callable[[], object]) -> bool:
        """Do something that may fail, and tell whether it has not."""
        try:
            act()
        except Exception as error:
            self._say(
                f"a trace could not be recorded for {self._directory.events}: "
                f"{type(error).__name__}: {error}. The training goes on"
            )
            return False
        return True


# Seconds for Horovod's thread to write the rest, and of silence after which it is done.
_PATIENCE, _REST = 5.0, 0.2
# Bytes at the file's end that contain the end of its last event.
_TAIL = 4096


class _Basics(Protocol):
    """Horovod's functions that exist for each framework."""

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None: ...

    def stop_timeline(self) -> None: ...


class Timeline:
    """One timeline of this rank, which is to be rank 0.

    Args:
        basics: Horovod, of any framework.
    """

    def __init__(self, basics: _Basics) -> None:
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
