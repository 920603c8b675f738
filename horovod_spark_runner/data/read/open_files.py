"""The Parquet files of a dataset that are open, a few at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError
from ...storage.filesystem import Location
from ..manifest import Manifest
from ..store import read_footer

# Kept open while no thread reads them; far below the 1,024 files that a process may have open.
IDLE_FILES = 64
# Kept of files of distant storage: without one, a request or two are made before the first row.
FOOTERS = 512


class OpenFiles:
    """Opens a dataset's files and keeps those that were used last.

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
        """Return one of the dataset's files, which is nobody else's until it is put back.

        Raises:
            DataError: it is gone, or another one than when the dataset was made.
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
                f"{location} is gone, which was there when the dataset was made; leave its files "
                "as long as they are read"
            ) from error
        footer = footer or self._checked(number, stream)
        # Over a network, few large requests are faster than many small ones. Writers like
        # Spark's leave a sum of each page, by which a damaged one is known.
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
            raise DataError(f"{place} is no Parquet file any more: {error}") from error
        if wanted and checksum != wanted[number]:
            raise DataError(
                f"{place} is another file than when the dataset was made: its footer has changed. "
                "Leave files as they are while they are read; of a dataset that was materialized, "
                "delete the folder, and the rows are written again"
            )
        return footer

    def put_back(self, number: int, file: pq.ParquetFile) -> None:
        """Take a file that has been read from; one that has not been used for long is closed."""
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
            if len(self._footers) > FOOTERS:
                self._footers.popitem(last=False)


def _close(file: pq.ParquetFile) -> None:
    """Close it and what it reads from, which it was given open."""
    file.close(force=True)
