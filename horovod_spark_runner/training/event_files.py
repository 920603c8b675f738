"""Event files of a training, as TensorBoard shows them: its curves, written by rank 0.

They are in TensorBoard's own format, written with its own classes, which need no framework. A run
that goes on copies what its checkpoint holds of them and leaves out the rest, which is trained
again: so a curve has one point per epoch, however often the run was begun.
"""

from __future__ import annotations

import io
import re
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from ..launch.worker.reporting import notify
from ..rundir.checkpoint import LogValue, PlainLogs
from ..rundir.directory import RunDirectory
from ..rundir.lock import holds
from ..storage.filesystem import Location
from ..storage.patience import HungError
from .logs import beside

TRAIN, VALIDATION = "train", "validation"
_PREFIX = "events.out.tfevents."
# How those that are written here end; a callback may write others into the same folders.
_MARK_DIGITS = 8
_OWN = re.compile(rf"{re.escape(_PREFIX)}.*\.[0-9a-f]{{{_MARK_DIGITS}}}")
_VALIDATED = "val_"
# A file that cannot be appended to is written anew, at most once in so many seconds.
_SECONDS = 30.0
# Around each record of a file: its size, with a checksum, and that of the record.
_HEADER, _SUM = struct.Struct("<QI"), struct.Struct("<I")


class EventFiles:
    """The event files of one attempt: ``events/train`` and ``events/validation``.

    What cannot be written is told once, and the training goes on.

    Args:
        directory: the run directory.
        token: the lock that must be held by the run.
        say: tells whoever called what went wrong.
    """

    def __init__(
        self, directory: RunDirectory, token: str, say: Callable[[str], None] = notify
    ) -> None:
        self._directory = directory
        self._token = token
        self._say = say
        self._parts: dict[str, _EventFile] = {}
        self._begun = False
        self._told = False
        self._hangs = False

    def epoch(self, number: int, logs: PlainLogs, facts: Mapping[str, float]) -> None:
        """Add the points of an epoch.

        Args:
            number: the epoch, counted from 0: the step of its points.
            logs: its metrics, those of the validation with ``val_`` before their names.
            facts: what else there is to know of its training; `beside` its metrics.
        """
        points: dict[str, dict[str, float]] = {TRAIN: {}, VALIDATION: {}}
        for name, value in {**logs, **beside(logs, facts)}.items():
            part = VALIDATION if name.startswith(_VALIDATED) else TRAIN
            points[part].update(_scalars(name.removeprefix(_VALIDATED), value))
        self._try(lambda: self._add(number, points))

    def close(self) -> None:
        """Write what is not written yet."""
        self._try(self._write)

    def _write(self) -> None:
        for file in self._parts.values():
            file.write()

    def _try(self, act: Callable[[], object]) -> None:
        if self._hangs:
            return
        try:
            if holds(self._directory, self._token):
                act()
        except Exception as error:  # curves are no reason to lose a training
            self._hangs = isinstance(error, HungError)
            if not self._told:
                self._told = True
                self._say(
                    f"event files could not be written to {self._directory.events}: "
                    f"{type(error).__name__}: {error}. The training goes on"
                )

    def _add(self, number: int, points: Mapping[str, Mapping[str, float]]) -> None:
        if not self._begun:
            second, mark = int(time.time()), uuid.uuid4().hex[:_MARK_DIGITS]
            name = f"{_PREFIX}{second:010d}.{socket.gethostname()}.{mark}"
            for part in points:
                folder = self._directory.events.join(part)
                self._parts[part] = _EventFile(folder, name, number)
            self._begun = True
        for part, scalars in points.items():
            if scalars:
                self._parts[part].add(number, scalars)


class _EventFile:
    """One event file, in place of those of earlier attempts.

    Args:
        folder: where it lies.
        name: its name.
        begin: the epoch this attempt begins with; what is there of it and later ones goes.
    """

    def __init__(self, folder: Location, name: str, begin: int) -> None:
        self._folder, self._place = folder, folder.join(name)
        self._records: list[bytes] = []
        self._written = 0
        self._last = -_SECONDS
        earlier = folder.list() if folder.exists() else []
        self._earlier = [file for file in earlier if _OWN.fullmatch(file.name)]
        # By epoch: an attempt that was killed while it took an earlier file over has left both.
        kept = {step: e for file in self._earlier for step, e in _events_before(file, begin)}
        if kept:
            self._put([_first_event(), *(kept[step] for step in sorted(kept))])

    def add(self, number: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        if not self._records:
            self._put([_first_event()])
        values = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()
        ]
        event = event_pb2.Event(
            wall_time=time.time(), step=number, summary=summary_pb2.Summary(value=values)
        )
        self._put([event.SerializeToString()])
        if self._place.is_local or time.monotonic() - self._last >= _SECONDS:
            self.write()

    def write(self) -> None:
        """Write what is not written yet; then earlier attempts' files are not needed any more."""
        if self._written < len(self._records):
            self._folder.make_folder()
            if self._place.is_local:
                self._place.append_bytes(b"".join(self._records[self._written :]))
            else:
                self._place.write_bytes(b"".join(self._records))
            self._written, self._last = len(self._records), time.monotonic()
        while self._earlier:
            self._earlier[-1].delete_file()
            self._earlier.pop()

    def _put(self, events: list[bytes]) -> None:
        self._records.extend(map(_record, events))


def _first_event() -> bytes:
    from tensorboard.compat.proto import event_pb2

    event = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
    data: bytes = event.SerializeToString()
    return data


def _record(event: bytes) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    RecordWriter(stream).write(event)
    return stream.getvalue()


def _events_before(file: Location, epoch: int) -> list[tuple[int, bytes]]:
    """Return the points of a file that lie before an epoch, by theirs; a torn end is left out."""
    from tensorboard.compat.proto import event_pb2

    return [
        (read.step, event)
        for event in _records_of(file.read_bytes())
        if (read := event_pb2.Event.FromString(event)).HasField("summary") and read.step < epoch
    ]


def _records_of(data: bytes) -> Iterator[bytes]:
    """Yield what `_record` made, up to what is torn or damaged.

    TensorBoard's reader would import TensorFlow where that is installed, in the trainings of other
    frameworks, too.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    begin = 0
    while begin + _HEADER.size <= len(data):
        size, _ = _HEADER.unpack_from(data, begin)
        end = begin + _HEADER.size + size
        event, told = data[begin + _HEADER.size : end], data[end : end + _SUM.size]
        if told != _SUM.pack(masked_crc32c(event)):
            return
        yield event
        begin = end + _SUM.size


def _scalars(name: str, value: LogValue) -> dict[str, float]:
    """Return the curves of a logged value: one, or one for each number of a list."""
    if isinstance(value, (list, tuple)):
        found: dict[str, float] = {}
        for number, inner in enumerate(value):
            found.update(_scalars(f"{name}/{number}", inner))
        return found
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {name: float(value)}
    return {}
