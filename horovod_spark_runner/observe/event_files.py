"""Event files of a training, as TensorBoard shows them: its curves, written by rank 0.

They are in TensorBoard's own format, written with its own classes, which need no framework. Each
attempt writes a file of its own, which begins by saying from which step on earlier files do not
count any more (a ``SessionLog`` of a start, as ``purge_step`` of PyTorch's ``SummaryWriter``): so a
curve has one point per epoch, however often the run was restarted.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..checkpoint.files import LogValue, PlainLogs
from ..checkpoint.run_directory import RunDirectory
from ..cluster.worker.reporting import notify
from ..storage.filesystem import Location
from ..storage.retries import HungError

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_TRAIN, _VALIDATION = "train", "validation"
_VALIDATED = "val_"
# A file that cannot be appended to is rewritten, at most once in so many seconds.
_SECONDS = 30.0


class EventFiles:
    """The event files of one attempt: ``events/train`` and ``events/validation``.

    A failure to write is reported once, and the training continues.

    Args:
        directory: the run directory, with the token of its lease.
        say: tells whoever called what went wrong.
    """

    def __init__(self, directory: RunDirectory, say: Callable[[str], None] = notify) -> None:
        self._directory = directory
        self._say = say
        self._parts: dict[str, _EventFile] = {}
        self._opened = False
        self._warned = False
        self._hangs = False

    def epoch(self, number: int, logs: PlainLogs, facts: Mapping[str, float]) -> None:
        """Add the points of an epoch.

        Args:
            number: the epoch, counted from 0: the step of its points.
            logs: its metrics, those of the validation with ``val_`` before their names.
            facts: what else there is to know of its training; `beside` its metrics.
        """
        points: dict[str, dict[str, float]] = {_TRAIN: {}, _VALIDATION: {}}
        for name, value in {**logs, **beside(logs, facts)}.items():
            part = _VALIDATION if name.startswith(_VALIDATED) else _TRAIN
            points[part].update(_scalars(name.removeprefix(_VALIDATED), value))
        self._try(lambda: self._add(number, points))

    def close(self) -> None:
        """Write all pending points."""
        self._try(self._write)

    def _write(self) -> None:
        for file in self._parts.values():
            file.write()

    def _try(self, act: Callable[[], object]) -> None:
        if self._hangs:
            return
        try:
            if self._directory.is_held():
                act()
        except Exception as error:  # curves are no reason to lose a training
            self._hangs = isinstance(error, HungError)
            if not self._warned:
                self._warned = True
                self._say(
                    f"event files could not be written to {self._directory.events}: "
                    f"{type(error).__name__}: {error}. The training goes on"
                )

    def _add(self, number: int, points: Mapping[str, Mapping[str, float]]) -> None:
        if not self._opened:
            # Attempts may follow each other within a second.
            name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}"
            for part in points:
                folder = self._directory.events.join(part)
                self._parts[part] = _EventFile(folder, name, number)
            self._opened = True
        for part, scalars in points.items():
            if scalars:
                self._parts[part].add(number, scalars)


class _EventFile:
    """One event file.

    Args:
        folder: where it lies.
        name: its name; TensorBoard reads the files of a folder in the order of their names.
        begin: the epoch this attempt begins with; what earlier files have of it and later ones does
            not count any more.
    """

    def __init__(self, folder: Location, name: str, begin: int) -> None:
        from tensorboard.compat.proto import event_pb2

        self._folder, self._place = folder, folder.join(name)
        self._records: list[bytes] = []
        self._written = 0
        self._last = -_SECONDS
        started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._put(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._put(event_pb2.Event(wall_time=time.time(), step=begin, session_log=started))

    def add(self, number: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        values = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()
        ]
        event = event_pb2.Event(
            wall_time=time.time(), step=number, summary=summary_pb2.Summary(value=values)
        )
        self._put(event)
        if self._place.is_local or time.monotonic() - self._last >= _SECONDS:
            self.write()

    def write(self) -> None:
        """Write all pending points."""
        if self._written < len(self._records):
            self._folder.make_folder()
            if self._place.is_local:
                self._place.append_bytes(b"".join(self._records[self._written :]))
            else:
                self._place.write_bytes(b"".join(self._records))
            self._written, self._last = len(self._records), time.monotonic()

    def _put(self, event: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        stream = io.BytesIO()
        RecordWriter(stream).write(event.SerializeToString())
        self._records.append(stream.getvalue())


def _scalars(name: str, value: LogValue) -> dict[str, float]:
    """Return the curves of a logged value: one, or one for each number of a list."""
    if isinstance(value, (list, tuple)):
        curves: dict[str, float] = {}
        for number, inner in enumerate(value):
            curves.update(_scalars(f"{name}/{number}", inner))
        return curves
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {name: float(value)}
    return {}


def beside(logs: Mapping[str, object], facts: Mapping[str, float]) -> dict[str, float]:
    """Rename a run's facts of an epoch where ``logs`` has the same names.

    ``run/`` goes before the name of a fact that a log is called like.
    """
    renamed = {}
    for name, value in facts.items():
        while name in logs:
            name = f"run/{name}"
        renamed[name] = value
    return renamed
