"""Files and folders in local and shared storage.

A location is a local path or a URL of any file system that pyarrow supports (``s3://``, ``gs://``),
or of HDFS; credentials come from the environment. All failures of storage are an ``OSError``, also
that it hangs: see `horovod_spark_runner.storage.retries`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import posixpath
import stat
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from ..errors import EnvironmentProblem, InvalidInputError, UnreachableError
from .contents import MAX_TEXT_BYTES, PART_BYTES, Contents, Sink, spool
from .paths import (
    HDFS_SCHEMES,
    check_name,
    check_whole_url,
    credentials_hint,
    expand_home,
    parent_of_url,
    path_of_url,
    scheme_of,
)
from .retries import Watchdog, call_with_timeout

T = TypeVar("T")
# Flags of renameat2: paths are relative to the working directory; the two change places.
_HERE, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class FileStat:
    """A file in storage.

    Attributes:
        name: its path below the folder that was listed.
        size: bytes.
        changed: time of its last change, in nanoseconds since 1970; 0 if unknown.
    """

    name: str
    size: int
    changed: int


def _file_stat(info: pafs.FileInfo, name: str) -> FileStat:
    return FileStat(name, info.size, info.mtime_ns or 0)


class Location:
    """A file or folder in local or shared storage.

    Args:
        place: a path (``~`` is the user's home), a ``file:`` URL or a URL of another file system.

    Raises:
        InvalidInputError: it is not a path, or the file system is unknown or cannot be reached.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        text = os.fspath(place) if isinstance(place, (str, os.PathLike)) else None
        if not text or not isinstance(text, str):
            raise InvalidInputError(f"a place in storage must be a path or URL, got {place!r}")
        check_whole_url(text)
        scheme = scheme_of(text)
        self._scheme = "" if scheme == "file" else scheme
        if scheme == "file":
            text = path_of_url(text)
        self._text = text if self._scheme else os.path.abspath(expand_home(text))
        # The location and path parts that this one was joined from; they share a client.
        self._above: tuple[Location, tuple[str, ...]] | None = None

    def __repr__(self) -> str:
        return f"Location({self._text!r})"

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return Location, (self._text,)

    @property
    def is_local(self) -> bool:
        return not self._scheme

    @property
    def has_atomic_rename(self) -> bool:
        """Whether a folder can be renamed in one step, as object stores cannot."""
        return self._scheme in ("", *HDFS_SCHEMES)

    @property
    def spark_url(self) -> str:
        """The location as Hadoop's ``Path`` expects it (unescaped)."""
        if self.is_local:
            return "file://" + self._text
        return "s3a" + self._text[2:] if self._scheme == "s3" else self._text

    @cached_property
    def _resolved(self) -> tuple[pafs.FileSystem, str]:
        if self.is_local:
            return pafs.LocalFileSystem(), self._text
        if self._above is not None:
            location, parts = self._above
            filesystem, path = location._resolved
            return filesystem, posixpath.join(path, *parts)
        scheme = "s3" if self._scheme in ("s3a", "s3n") else self._scheme
        authority, _, path = self._text.partition("://")[2].partition("/")
        try:
            if scheme in HDFS_SCHEMES:
                return _connect_hdfs(scheme, authority), f"/{path}"
            # Names are unescaped here; pyarrow expects them escaped.
            filesystem, path = pafs.FileSystem.from_uri(f"{scheme}://{authority}/{quote(path)}")
        except (pa.ArrowInvalid, OSError, ValueError) as error:
            lacking = credentials_hint(scheme)
            away = isinstance(error, OSError) and not lacking
            raise (UnreachableError if away else InvalidInputError)(
                f"{self._text}: storage cannot be reached from {os.uname().nodename}: {error}"
                f"{lacking}"
            ) from error
        return filesystem, path

    @property
    def name(self) -> str:
        return posixpath.basename(self._text.rstrip("/"))

    @property
    def parent(self) -> Location:
        """The folder this file or folder is in; of a root, itself."""
        above = posixpath.dirname if self.is_local else parent_of_url
        return Location(above(self._text))

    def join(self, *parts: str) -> Location:
        """Return a file or folder in this folder.

        Raises:
            InvalidInputError: a part leads out of it; see `check_name`.
        """
        return self._joined(*map(check_name, parts))

    def _joined(self, *parts: str) -> Location:
        joined = Location(posixpath.join(self._text, *parts))
        # A client of an object store takes tens of milliseconds to make, and keeps connections.
        joined._above = (self, parts)
        return joined

    def _ask(self, ask: Callable[[pafs.FileSystem, str], T]) -> T:
        """Return the file system's answer about this location."""
        return call_with_timeout(lambda watchdog: ask(*self._resolved), self._text)

    def _info(self) -> pafs.FileInfo:
        return self._ask(lambda filesystem, path: filesystem.get_file_info(path))

    def exists(self) -> bool:
        return bool(self._info().type != pafs.FileType.NotFound)

    @property
    def is_folder(self) -> bool:
        return bool(self._info().type == pafs.FileType.Directory)

    def stat(self) -> FileStat | None:
        """Return this file's facts; ``None`` if it does not exist."""
        info = self._info()
        return _file_stat(info, info.base_name) if info.type == pafs.FileType.File else None

    def files(self) -> list[FileStat]:
        """Return all files in this folder and the folders in it, sorted by name."""
        start = len(self._resolved[1].rstrip("/")) + 1
        return sorted(
            (
                _file_stat(info, info.path[start:])
                for info in self._infos(recursive=True)
                if info.type == pafs.FileType.File
            ),
            key=lambda stat: stat.name,
        )

    def list(self) -> list[Location]:
        """Return the entries of this folder, sorted by name; none if it does not exist."""
        names = []
        for info in self._infos(recursive=False):
            with contextlib.suppress(UnicodeDecodeError):  # not UTF-8, so not one of ours
                names.append(info.base_name)
        return [self._joined(name) for name in sorted(names)]

    def _infos(self, *, recursive: bool) -> Sequence[pafs.FileInfo]:
        def ask(filesystem: pafs.FileSystem, path: str) -> Sequence[pafs.FileInfo]:
            selector = pafs.FileSelector(path, recursive=recursive, allow_not_found=True)
            infos: Sequence[pafs.FileInfo] = filesystem.get_file_info(selector)
            return infos

        return self._ask(ask)

    def make_folder(self) -> None:
        self._ask(lambda filesystem, path: filesystem.create_dir(path, recursive=True))

    def delete_folder(self) -> None:
        """Delete this folder and all in it; does nothing if it does not exist.

        If it is a link to a folder, only the link is deleted.
        """
        if self.is_local and call_with_timeout(lambda _: _unlinked(self._text), self._text):
            return
        if self.exists():
            self._ask(lambda filesystem, path: filesystem.delete_dir(path))

    def resolve_links(self) -> Location:
        """Return the folder that a local link leads to; this location if it is no link."""
        if not self.is_local:
            return self
        return Location(call_with_timeout(lambda _: os.path.realpath(self._text), self._text))

    def delete_file(self) -> None:
        self._ask(lambda filesystem, path: filesystem.delete_file(path))

    def move_to(self, target: Location) -> None:
        """Rename this file or folder (atomic on local and HDFS storage)."""
        self._ask(lambda filesystem, path: filesystem.move(path, target._resolved[1]))

    def exchange_with(self, other: Location) -> bool:
        """Exchange this folder with another, both local, in one step.

        Returns:
            Whether it was done: not every file system can.
        """
        if not (self.is_local and other.is_local):
            return False
        return call_with_timeout(lambda _: _exchange(self._text, other._text), self._text)

    def open_input(self) -> pa.NativeFile:
        """Open this file for random access.

        Raises:
            InvalidInputError: it is a device or a pipe, which may have no end.
            OSError: it cannot be read.
        """

        def ask(filesystem: pafs.FileSystem, path: str) -> pa.NativeFile:
            self._check_regular()
            return filesystem.open_input_file(path)

        return self._ask(ask)

    def _open_stream(self) -> pa.NativeFile:
        filesystem, path = self._resolved
        self._check_regular()
        return filesystem.open_input_stream(path)

    def _check_regular(self) -> None:
        if self.is_local:
            mode = os.stat(self._text).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise InvalidInputError(f"{self._text} is not a regular file")

    def read_bytes(self, limit: int | None = None) -> bytes:
        """Return this file's bytes.

        Args:
            limit: largest allowed size.

        Raises:
            InvalidInputError: it has more, or is a device or a pipe.
            OSError: it cannot be read.
        """
        return call_with_timeout(lambda watchdog: self._read(watchdog, limit), self._text)

    def _read(self, watchdog: Watchdog, limit: int | None) -> bytes:
        whole = io.BytesIO()  # returns its bytes without a copy
        with self._open_stream() as stream:
            while part := stream.read(PART_BYTES):
                if limit is not None and whole.tell() + len(part) > limit:
                    raise InvalidInputError(f"{self._text} has more than {limit:,} bytes")
                whole.write(part)
                watchdog.reset()
        return whole.getvalue()

    def read_text(self) -> str:
        """Return the text of a small file; see `read_bytes`."""
        return self.read_bytes(MAX_TEXT_BYTES).decode("utf-8")

    def spool(self, seen: Callable[[bytes], Any]) -> Contents:
        """Return this file's contents: in memory if they are small, else in a mapped copy.

        Args:
            seen: called with each part as it is read.
        """
        return call_with_timeout(
            lambda watchdog: spool(lambda file: self._pour(watchdog, file.write, seen)), self._text
        )

    def scan(self, seen: Callable[[bytes], Any]) -> None:
        """Read this file in parts, and call ``seen`` with each."""
        call_with_timeout(lambda watchdog: self._pour(watchdog, seen), self._text)

    def write_bytes(self, data: bytes | memoryview | Contents) -> None:
        """Write a whole file; see `write_stream`."""
        self.write_stream(lambda sink: sink.write_all(data))

    def write_stream(self, write: Callable[[Sink], object]) -> None:
        """Write a whole file atomically: a reader sees the old one or the new one, never a part.

        Local and HDFS files are written aside and renamed; object stores show an object only
        when it is complete. A local file has reached the disk when this returns.

        Args:
            write: writes its contents sequentially.
        """
        if not self.has_atomic_rename:
            self.write_stream_in_place(write)
            return
        folder, _, name = self._text.rpartition("/")
        aside = Location(f"{folder}/.{name}.{uuid.uuid4().hex[:8]}")
        try:
            aside.write_stream_in_place(write)
            aside.move_to(self)
        except BaseException:
            # A partial file must not keep a full disk full.
            with contextlib.suppress(OSError):
                aside.delete_file()
            raise

    def append_bytes(self, data: bytes) -> None:
        """Append to a local file, which is created if needed; all of the data or nothing.

        On a full disk a part would stay, with later data behind it.
        """
        call_with_timeout(lambda _: self._append(data), self._text)

    def _append(self, data: bytes) -> None:
        WRITE_FAULTS.check(self._text)
        with open(self._text, "ab", buffering=0, opener=open_no_link) as stream:
            before, left = stream.tell(), memoryview(data)
            try:
                while left:
                    left = left[stream.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    stream.truncate(before)
                raise

    def write_in_place(self, data: bytes | memoryview | Contents) -> None:
        """Write a whole file that has no readers yet; a local one has then reached the disk."""
        self.write_stream_in_place(lambda sink: sink.write_all(data))

    def write_stream_in_place(self, write: Callable[[Sink], object]) -> None:
        """Write a whole file that has no readers yet; see `write_stream`."""
        call_with_timeout(lambda watchdog: self._write(write, watchdog), self._text)

    def _write(self, write: Callable[[Sink], object], watchdog: Watchdog) -> None:
        WRITE_FAULTS.check(self._text)
        with self.open_output() as stream:
            write(Sink(stream, watchdog.reset))
            self._reach_disk(stream)

    def open_output(self) -> Any:
        """Open a new file that has no readers yet, to be written in parts."""
        filesystem, path = self._resolved
        return open(path, "wb") if self.is_local else filesystem.open_output_stream(path)

    def copy_to(self, target: Location, seen: Callable[[bytes], Any]) -> None:
        """Copy this file to ``target``, which has no readers yet, in parts.

        Args:
            target: the new file; a local one has then reached the disk.
            seen: called with each part.
        """
        call_with_timeout(lambda watchdog: self._copy(target, seen, watchdog), self._text)

    def _copy(self, target: Location, seen: Callable[[bytes], Any], watchdog: Watchdog) -> None:
        with target.open_output() as stream:
            self._pour(watchdog, stream.write, seen)
            target._reach_disk(stream)

    def _pour(self, watchdog: Watchdog, *takers: Callable[[bytes], Any]) -> None:
        with self._open_stream() as source:
            while part := source.read(PART_BYTES):
                for take in takers:
                    take(part)
                watchdog.reset()

    def _reach_disk(self, stream: Any) -> None:
        if self.is_local:
            stream.flush()
            os.fsync(stream.fileno())

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode("utf-8", "backslashreplace"))


class _WriteFaults:
    """Write errors that a test requests, in any thread of this process.

    See `horovod_spark_runner.testing`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = False
        self._until = 0.0

    def begin(self, seconds: float) -> None:
        """Make the next write fail, and all writes of the next ``seconds``."""
        with self._lock:
            self._next, self._until = True, time.monotonic() + seconds

    def end(self) -> None:
        """Make writes succeed again."""
        with self._lock:
            self._next, self._until = False, 0.0

    def check(self, path: str) -> None:
        """Fail the write to ``path`` that is about to happen, if a test requests it.

        Raises:
            OSError: the test requests the failure.
        """
        with self._lock:
            fails = self._next or time.monotonic() < self._until
            self._next = False
        if fails:
            raise OSError(errno.EIO, "a fault of storage that a test has requested", path)


WRITE_FAULTS = _WriteFaults()


def open_no_link(path: str, flags: int) -> int:
    """Open a file for `open`, but no link, which may lead anywhere: that is an ``OSError``."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _unlinked(path: str) -> bool:
    """Delete a link; return whether there was one."""
    if not os.path.islink(path):
        return False
    os.unlink(path)
    return True


def _exchange(one: str, other: str) -> bool:
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    places = (_HERE, os.fsencode(one), _HERE, os.fsencode(other))
    return rename is not None and rename(*places, _RENAME_EXCHANGE) == 0


def _connect_hdfs(scheme: str, authority: str) -> pafs.FileSystem:
    try:
        from .hdfs import connect
    except ImportError as error:
        raise EnvironmentProblem(
            f"{scheme}:// needs the package hdfs-native on the driver and all executors: "
            "pip install 'horovod_spark_runner[hdfs]'"
        ) from error
    return connect(scheme, authority)
