"""Traces of a training, where they are asked for: Horovod's timeline, and profiles of steps.

Rank 0 records them into a folder of its own, and puts them into the run directory once they are
whole. A training is not lost for a trace: what cannot be recorded is told, and it goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..errors import ModelError
from ..launch.worker.reporting import notify
from ..rundir.directory import RunDirectory
from ..storage.contents import Contents, FilePart
from ..storage.lease import holds
from .spec import TrainingSpec

PROFILE = "profile"


class Tracer(Protocol):
    """What a framework records with."""

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
        asked = spec.checkpoints
        if tracer is None and (asked.timeline or asked.profile_steps):
            raise ModelError(
                f"timeline and profile_steps: engine {spec.engine!r} records no traces; leave "
                "them out"
            )
        self._tracer = tracer if rank == 0 else None
        self._timeline = asked.timeline
        self._first, self._last = asked.profile_steps or (0, -1)
        self._directory, self._token = RunDirectory(spec.run_dir), spec.lock_token
        self._say = say
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tried = self._recording = False
        self._profiling = self._profiled = False

    def before(self, step: int) -> None:
        """Begin what is to be recorded.

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
        """End what is recorded up to here.

        Args:
            step: steps of the run that are done; anything may follow.
        """
        if self._profiling and step >= self._last:
            self._end_profile()

    def close(self) -> None:
        """End what is still recorded, and tell of what there was nothing to record of."""
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
            self._tracer.stop_profile(Path(name, PROFILE), f"step-{self._first:08d}")
            self._put(Path(name))

    def _put(self, folder: Path) -> None:
        """Put the files of a folder into the run directory, beside the event files."""
        if not holds(self._directory.lock, self._token):
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
