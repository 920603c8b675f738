"""Zip archives of others, measured before anything is unpacked."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from ..errors import HorovodSparkError, InvalidInputError, escaped
from .paths import check_name

# Limits: entries, and bytes unpacked as a multiple of those packed, beyond what any may have.
MAX_ENTRIES, MAX_RATIO, ANY_BYTES = 100_000, 20, 64 * 1024 * 1024


@contextlib.contextmanager
def open_archive(file: IO[bytes], kind: str) -> Iterator[zipfile.ZipFile]:
    """Open an archive to read from it, for a ``with`` statement.

    Args:
        file: the archive.
        kind: what it should be, for messages.

    Raises:
        InvalidInputError: it is none, or is damaged, here or within the statement; or it has a
            name twice, or is far larger when unpacked.
        OSError: it cannot be read.
    """
    with parsing(kind), zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {one.filename for one in entries}
        if len(names) < len(entries) or len(names) > MAX_ENTRIES:
            raise ValueError(f"it has {len(entries):,} entries of {len(names):,} names")
        unpacked, packed = sum(one.file_size for one in entries), file.seek(0, os.SEEK_END)
        if unpacked > ANY_BYTES + MAX_RATIO * packed:
            raise ValueError(
                f"its {packed:,} bytes unpack to {unpacked:,}, which looks like an attack; if it "
                "is right, pack it again without compression"
            )
        yield archive


@contextlib.contextmanager
def parsing(kind: str) -> Iterator[None]:
    """Let all that goes wrong with the bytes of others, but not with storage, be one error.

    Args:
        kind: what they should be, for messages.

    Raises:
        InvalidInputError: they are none.
    """
    try:
        yield
    except (HorovodSparkError, MemoryError):
        raise
    except Exception as error:  # zipfile raises a dozen types, of each way to be damaged
        escaped(error)
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidInputError(f"not {kind}: {error or type(error).__name__}") from error


def unpack(file: IO[bytes], folder: str | os.PathLike[str], kind: str) -> None:
    """Write an archive's files into a folder, if none leads out of it; see `open_archive`."""
    with open_archive(file, kind) as archive:
        for name in archive.namelist():
            check_name(name.removesuffix("/"))
        archive.extractall(folder)


def read_entry(file: IO[bytes], name: str, kind: str) -> Any:
    """Return one file of an archive; see `open_archive`."""
    with open_archive(file, kind) as archive:
        return archive.read(name)
