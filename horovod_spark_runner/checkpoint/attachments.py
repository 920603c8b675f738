"""Files for the ranks that are too large for their call: kept in the run directory meanwhile."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import CheckpointError
from ..storage.checksums import read_verified_file, verify_file, write_with_checksum
from ..storage.contents import SMALL_BYTES, Contents, FilePart
from ..storage.filesystem import Location
from .run_directory import RunDirectory

logger = logging.getLogger(__name__)
_ELSEWHERE = "; the run directory must be a place that the driver and all executors reach"


@dataclass(frozen=True)
class AttachedFile:
    """Contents that lie in the run directory while a call trains.

    Attributes:
        place: the file.
        sum: its SHA-256.
        size: its bytes.
    """

    place: Location
    sum: str
    size: int

    def contents(self) -> Contents:
        """Return what was handed over; nothing of it is in memory yet.

        Raises:
            CheckpointError: it is missing, damaged or cannot be read.
        """
        folder, name = self.place.parent, self.place.name
        try:
            if not self.place.is_local:
                return read_verified_file(folder, name, {name: self.sum})
            verify_file(folder, name, {name: self.sum})
            return Contents(FilePart(str(self.place), 0, self.size))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.place}, which the driver has left for the ranks, cannot be read: {error}"
                f"{_ELSEWHERE if isinstance(error.__cause__, FileNotFoundError) else ''}"
            ) from error


# What a call carries of contents: themselves, or where they are.
Carried: TypeAlias = "Contents | AttachedFile"


def contents_of(carried: Carried) -> Contents:
    """Return what a call carries, or says where it is.

    Raises:
        CheckpointError: see `AttachedFile.contents`.
    """
    return carried.contents() if isinstance(carried, AttachedFile) else carried


class AttachmentWriter:
    """Leaves large contents in a run directory; see `open_attachments`.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, carried: Carried) -> Carried:
        """Return what the call is to carry: small contents as they are.

        Raises:
            CheckpointError: the run directory does not take them.
        """
        if isinstance(carried, AttachedFile) or carried.size <= SMALL_BYTES:
            return carried
        place = self._folder.join(f"{self._count:04}")
        self._count += 1
        try:
            self._folder.make_folder()
            checksum = write_with_checksum(place.write_by, lambda sink: sink.write_all(carried))
        except OSError as error:
            raise CheckpointError(
                f"{place}: the run directory does not take the {carried.size:,} bytes that the "
                f"ranks are to begin with: {error}"
            ) from error
        return AttachedFile(place, checksum, carried.size)


@contextlib.contextmanager
def open_attachments(directory: RunDirectory) -> Iterator[AttachmentWriter]:
    """Hand large contents to the ranks of a call, whose lock is held; at the end they go."""
    with contextlib.suppress(OSError):  # what a killed call has left
        directory.attachments.delete_folder()
    # Its own: a call that has lost the lock leaves alone what the next one hands over.
    folder = directory.attachments.join(uuid.uuid4().hex[:8])
    try:
        yield AttachmentWriter(folder)
    finally:
        try:
            folder.delete_folder()
            if not directory.attachments.list():
                directory.attachments.delete_folder()
        except OSError as error:
            logger.warning("%s could not be deleted: %s", folder, error)
