"""Attachments of a call: contents too large to be sent, left in the run directory for the ranks."""

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
    """Contents in the run directory, while a call trains.

    Attributes:
        place: the file.
        sum: its SHA-256.
        size: its bytes.
    """

    place: Location
    sum: str
    size: int

    def contents(self) -> Contents:
        """Return the contents, verified but not yet in memory.

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
                f"{self.place}, an attachment for the ranks, cannot be read: {error}"
                f"{_ELSEWHERE if isinstance(error.__cause__, FileNotFoundError) else ''}"
            ) from error


# Contents of a call: themselves, or their attachment.
Attachable: TypeAlias = "Contents | AttachedFile"


def contents_of(carried: Attachable) -> Contents:
    """Return contents, or those of an attachment.

    Raises:
        CheckpointError: see `AttachedFile.contents`.
    """
    return carried.contents() if isinstance(carried, AttachedFile) else carried


class AttachmentWriter:
    """Leaves large contents in a run directory; see `open_attachments`.

    Args:
        folder: the folder for them.
    """

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, carried: Attachable) -> Attachable:
        """Attach large contents; return small ones unchanged.

        Raises:
            CheckpointError: they cannot be written.
        """
        if isinstance(carried, AttachedFile) or carried.size <= SMALL_BYTES:
            return carried
        place = self._folder.join(f"{self._count:04}")
        self._count += 1
        try:
            self._folder.make_folder()
            checksum = write_with_checksum(place.write_stream, lambda sink: sink.write_all(carried))
        except OSError as error:
            raise CheckpointError(
                f"{place}: the {carried.size:,} bytes that the ranks start with could not be "
                f"written: {error}"
            ) from error
        return AttachedFile(place, checksum, carried.size)


@contextlib.contextmanager
def open_attachments(directory: RunDirectory) -> Iterator[AttachmentWriter]:
    """Yield what attaches large contents to a call that holds the lease; delete them at the end."""
    with contextlib.suppress(OSError):  # of a killed call
        directory.attachments.delete_folder()
    # A folder per call: one that has lost the lease must not delete the next one's.
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
