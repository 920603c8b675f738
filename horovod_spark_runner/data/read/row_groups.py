"""Row groups to NumPy arrays, read ahead by several threads.

Reading from an object store waits most of the time, and decoding Parquet is work for more than one
core. So the next rows are announced, and their row groups read while others are in use. A dataset
that fits into memory is read only once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import CheckpointError, DataError
from ...storage.arrays import Arrays
from ...storage.checksums import compute_checksum
from ...storage.filesystem import Location
from ...storage.retries import HungError, await_with_timeout, retry
from ..manifest import Column, Manifest, RowGroup
from .arrow_to_numpy import column_to_numpy
from .sharding import Piece

# Unused files that are kept open; far below the 1,024 that a process may have open.
IDLE_FILES = 64
# Cached footers of remote files: each saves a request or two before the first row.
_MAX_FOOTERS = 512
_MAGIC = b"PAR1"
# Bytes read at once; only a footer of many row groups or columns is larger.
_TAIL = 64 * 1024
# Bytes of the footer's length and the mark behind it.
_END = 8


@dataclass(frozen=True)
class _ReadAhead:
    """Limits of reading ahead.

    Attributes:
        threads: row groups that are read at a time.
        size: uncompressed bytes of all waiting row groups; a single one may be larger.
    """

    threads: int
    size: int


_LOCAL = _ReadAhead(4, 8 * 1024 * 1024)
# Most of the time is spent waiting for answers: 30 ms for 2 MB are 64 MB/s and thread.
_REMOTE = _ReadAhead(16, 64 * 1024 * 1024)


class RowGroupReader:
    """Reads parts of a dataset's row groups.

    Args:
        manifest: the dataset.
        columns: the columns to read.
        keep_bytes: a dataset that takes no more memory than this is cached once it is read.
        ahead: limits of reading ahead; by default those of the storage.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Iterable[Column],
        keep_bytes: int = 0,
        ahead: _ReadAhead | None = None,
    ) -> None:
        self._manifest = manifest
        self._columns = list(columns)
        self._files = _OpenFiles(manifest)
        self._bound = ahead or (_LOCAL if Location(manifest.url).is_local else _REMOTE)
        self._threads: ThreadPoolExecutor | None = None
        self._hangs = False  # one of them
        self._announced: deque[int] = deque()
        self._ahead: list[tuple[int, Future[pa.Table]]] = []
        self._current: tuple[int, pa.Table] | None = None
        # Whole row groups, by number.
        self._cache: dict[int, Arrays] = {}
        self._keep = manifest.size <= keep_bytes

    def announce(self, pieces: Iterable[Piece]) -> None:
        """Announce the next pieces, in order; earlier announcements are dropped.

        It need not be exact: other pieces are read on request.
        """
        self._forget()
        numbers = [piece.row_group for piece in pieces]
        if self._keep:
            self._announced.extend(n for n in dict.fromkeys(numbers) if n not in self._cache)
        else:
            self._announced.extend(number for number, _ in itertools.groupby(numbers))

    def read(self, piece: Piece) -> Arrays:
        """Return the piece's values by column, as views of Arrow's memory.

        Raises:
            DataError: a value is null, not finite, or of another length than it should be; or a
                file has changed.
            CheckpointError: the storage fails repeatedly, or hangs.
        """
        if self._keep:
            cached = self._cached_group(piece.row_group)
            return {name: values[piece.start : piece.stop] for name, values in cached.items()}
        if self._current is None or self._current[0] != piece.row_group:
            self._current = None  # released before the next is awaited
            self._current = (piece.row_group, self._fetch(piece.row_group))
            self._read_ahead()
        return self._arrays(self._current[1], piece)

    def describe(self, piece: Piece, row: int) -> str:
        """Return the file and position of ``row`` in ``piece``, for a message."""
        group = self._manifest.row_groups[piece.row_group]
        file = self._files.location(group.file)
        return f"row {piece.start + row} of row group {group.index} of {file}"

    def close(self) -> None:
        self._forget()
        if self._threads is not None:
            self._threads.shutdown(wait=not self._hangs, cancel_futures=True)
            self._threads = None
        self._files.close()
        self._cache.clear()

    def _forget(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._announced.clear()
        self._current = None

    def _cached_group(self, number: int) -> Arrays:
        if number not in self._cache:
            table = self._fetch(number)
            self._read_ahead()
            arrays = self._arrays(table, Piece(number, 0, self._group(number).rows))
            for values in arrays.values():
                values.flags.writeable = False
            self._cache[number] = arrays
        return self._cache[number]

    def _arrays(self, table: pa.Table, piece: Piece) -> Arrays:
        rows = table.slice(piece.start, piece.stop - piece.start)
        arrays = {c.name: column_to_numpy(rows.column(c.name), c) for c in self._columns}
        for column in self._columns:
            # The values of bytes are known only once they are read.
            unknown = column.encoding == "raw" and not self._manifest.allow_nan
            if unknown or not self._manifest.verified:
                self._check_finite(arrays[column.name], column, piece)
        return arrays

    def _fetch(self, number: int) -> pa.Table:
        while self._announced and all(ahead != number for ahead, _ in self._ahead):
            self._submit()
        for index, (ahead, future) in enumerate(self._ahead):
            if ahead == number:
                del self._ahead[index]
                return self._awaited(number, future)
        return self._awaited(number, self._begin(number))

    def _awaited(self, number: int, future: Future[pa.Table]) -> pa.Table:
        place = self._files.location(self._group(number).file)
        try:
            return await_with_timeout(future, str(place))
        except HungError as error:
            self._hangs = True
            raise CheckpointError(f"{place} cannot be read: {error}") from error

    def _read_ahead(self) -> None:
        waiting = sum(self._group(number).size for number, _ in self._ahead)
        while self._announced:
            waiting += self._group(self._announced[0]).size
            if self._ahead and waiting > self._bound.size:
                return
            self._submit()

    def _submit(self) -> None:
        number = self._announced.popleft()
        self._ahead.append((number, self._begin(number)))

    def _begin(self, number: int) -> Future[pa.Table]:
        """Read a row group in a thread, with retries."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._bound.threads, "hsr-row-groups")
        message = f"{self._files.location(self._group(number).file)} cannot be read"
        return self._threads.submit(retry, functools.partial(self._read_group, number), message)

    def _group(self, number: int) -> RowGroup:
        return self._manifest.row_groups[number]

    def _read_group(self, number: int) -> pa.Table:
        group = self._group(number)
        file = self._files.take(group.file)
        try:
            table = file.read_row_group(group.index, columns=[c.name for c in self._columns])
        except (OSError, pa.ArrowInvalid) as error:
            with contextlib.suppress(OSError):
                file.close(force=True)
            if isinstance(error, OSError) and "CRC" not in str(error):
                raise
            file_place = self._files.location(group.file)
            raise DataError(
                f"{file_place} is damaged ({error}); if it was materialized, delete its folder: "
                "the rows are written again"
            ) from error
        self._files.put_back(group.file, file)
        return table

    def _check_finite(self, values: np.ndarray, column: Column, piece: Piece) -> None:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        rows = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
        raise DataError(
            f"column {column.name!r} has values that are NaN or infinite, first in "
            f"{self.describe(piece, int(rows[0]))}; allow them with allow_nan=True"
        )


class _OpenFiles:
    """Opens a dataset's files, and keeps those used last open.

    Args:
        manifest: the dataset.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._location = Location(manifest.url)
        self._lock = threading.Lock()
        # By file and order of use; a file may be open more than once.
        self._idle: list[tuple[int, pq.ParquetFile]] = []
        self._footers: OrderedDict[int, pq.FileMetaData] = OrderedDict()

    def take(self, number: int) -> pq.ParquetFile:
        """Return one of the dataset's files, for exclusive use until it is put back.

        Raises:
            DataError: it is missing, or has changed since the dataset was made.
            OSError: the storage fails.
        """
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == number:
                    return self._idle.pop(index)[1]
            footer = self._footers.get(number)
        location = self.location(number)
        try:
            stream = location.open_input()
        except FileNotFoundError as error:
            raise DataError(
                f"{location} is missing, but existed when the dataset was made; keep its files "
                "while they are read"
            ) from error
        footer = footer or self._checked(number, stream)
        # Over a network, few large requests are faster than many small ones. Writers such as Spark
        # add a checksum of each page.
        file = pq.ParquetFile(
            stream,
            metadata=footer,
            pre_buffer=not location.is_local,
            page_checksum_verification=True,
        )
        if not location.is_local:
            self._keep(number, footer)
        return file

    def _checked(self, number: int, stream: pa.NativeFile) -> pq.FileMetaData:
        place, wanted = self.location(number), self._manifest.footers
        try:
            footer, checksum = read_footer(stream)
        except pa.ArrowInvalid as error:
            raise DataError(f"{place} is damaged since the dataset was made: {error}") from error
        if wanted and checksum != wanted[number]:
            raise DataError(
                f"{place} has changed since the dataset was made: its footer differs. Do not "
                "change files while they are read; if the dataset was materialized, delete its "
                "folder: the rows are written again"
            )
        return footer

    def put_back(self, number: int, file: pq.ParquetFile) -> None:
        """Put back a file after use; the least recently used one may be closed."""
        oldest = None
        with self._lock:
            self._idle.append((number, file))
            if len(self._idle) > IDLE_FILES:
                _, oldest = self._idle.pop(0)
        if oldest is not None:
            _close(oldest)

    def location(self, number: int) -> Location:
        return self._location.join(self._manifest.files[number])

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._footers.clear()
        for _, file in idle:
            _close(file)

    def _keep(self, number: int, footer: pq.FileMetaData) -> None:
        with self._lock:
            self._footers[number] = footer
            self._footers.move_to_end(number)
            if len(self._footers) > _MAX_FOOTERS:
                self._footers.popitem(last=False)


def _close(file: pq.ParquetFile) -> None:
    """Close the file and its stream."""
    file.close(force=True)


def read_footer(stream: pa.NativeFile) -> tuple[pq.FileMetaData, str]:
    """Return a file's footer, and its checksum.

    Args:
        stream: the file, opened to be read anywhere.

    Raises:
        pa.ArrowInvalid: it is not a Parquet file.
    """
    size = stream.size()
    tail = stream.read_at(min(size, _TAIL), max(0, size - _TAIL))
    whole = int.from_bytes(tail[-_END:-4], "little") + _END
    if tail[-4:] != _MAGIC or whole > size:
        raise pa.ArrowInvalid(f"it does not end with a footer of Parquet ({size} bytes)")
    if whole > len(tail):
        tail = stream.read_at(whole, size - whole)
    footer = tail[-whole:]
    return pq.read_metadata(pa.BufferReader(_MAGIC + footer)), compute_checksum(footer)[:16]
