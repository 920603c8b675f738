"""Contents of files, read in parts: models may be larger than free memory."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from ..errors import HorovodSparkError, InvalidInputError, escaped
from .paths import check_name

# Bytes of the largest contents that are held in memory.
SMALL_BYTES = 16 * 1024 * 1024
# Bytes of the longest text that is read: JSON, lines of JSON, journals.
MAX_TEXT_BYTES = 64 * 1024 * 1024
# Bytes that are read at once of larger contents.
PART_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class FilePart:
    """A part of a local file.

    Attributes:
        path: the file.
        begin: its first byte in the file.
        size: how many bytes it has.
    """

    path: str
    begin: int
    size: int


Piece: TypeAlias = "bytes | memoryview | FilePart"


class Contents:
    """Immutable bytes in memory, in mapped files or in parts of files, one after the other.

    Pickled, they are one object of bytes; `horovod_spark_runner.serialize` can leave them out.

    Args:
        pieces: where the bytes are, in their order.

    Attributes:
        size: how many bytes there are.
    """

    def __init__(self, *pieces: Piece) -> None:
        self.pieces = pieces
        self.size = sum(_size(piece) for piece in pieces)

    def __repr__(self) -> str:
        return f"Contents({self.size} bytes)"

    def __reduce__(self) -> tuple[object, ...]:
        return Contents, (self.read(),)

    def __copy__(self) -> Contents:
        return self

    def __deepcopy__(self, memo: object) -> Contents:
        return self

    def open(self) -> IO[bytes]:
        """Return a seekable file of them."""
        return io.BufferedReader(_Reader(self.pieces))

    def parts(self, size: int = PART_BYTES) -> Iterator[bytes | memoryview]:
        """Yield them in parts of at most ``size`` bytes."""
        for piece in self.pieces:
            if isinstance(piece, FilePart):
                with open(piece.path, "rb") as file:
                    file.seek(piece.begin)
                    for begin in range(0, piece.size, size):
                        count = min(size, piece.size - begin)
                        yield _whole(file.read(count), piece, count)
            else:
                view = memoryview(piece)
                for begin in range(0, len(view), size):
                    yield view[begin : begin + size]

    def write_to(self, path: Path) -> None:
        """Write them into a local file."""
        with path.open("wb") as file:
            for part in self.parts():
                file.write(part)

    def read(self) -> bytes:
        """Return them as one object."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], bytes):
            return self.pieces[0]
        return b"".join(self.parts())


class _Reader(io.RawIOBase):
    """Reads pieces as one file."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._place = 0
        self._size = sum(map(_size, pieces))
        self._file: tuple[str, IO[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        begin = self._place
        for piece in self._pieces:
            size = _size(piece)
            if begin < size:
                count = min(len(into), size - begin)
                into[:count] = self._some(piece, begin, count)
                self._place += count
                return count
            begin -= size
        return 0

    def _some(self, piece: Piece, begin: int, count: int) -> bytes | memoryview:
        if not isinstance(piece, FilePart):
            return memoryview(piece)[begin : begin + count]
        if self._file is None or self._file[0] != piece.path:
            self._close_file()
            self._file = piece.path, open(piece.path, "rb", buffering=0)  # noqa: SIM115
        self._file[1].seek(piece.begin + begin)
        return _whole(self._file[1].read(count), piece, count)

    def close(self) -> None:
        self._close_file()
        super().close()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file[1].close()
            self._file = None


class Sink:
    """A file that is written sequentially.

    Args:
        stream: receives the parts.
        on_write: called after each part.

    Attributes:
        seen: called with each part, if it is set.
    """

    def __init__(self, stream: IO[bytes], on_write: Callable[[], object]) -> None:
        self._stream = stream
        self._on_write = on_write
        self.seen: Callable[[bytes | memoryview], object] | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write some bytes; return how many they were."""
        view = memoryview(data).cast("B")
        self.write_all(view)
        return len(view)

    def write_all(self, data: bytes | memoryview | Contents) -> None:
        """Write any number of bytes."""
        whole = data if isinstance(data, Contents) else Contents(memoryview(data).cast("B"))
        for part in whole.parts():
            self._stream.write(part)
            if self.seen is not None:
                self.seen(part)
            self._on_write()

    def flush(self) -> None:
        """Do nothing: the file is flushed once it is complete."""


def _size(piece: Piece) -> int:
    return piece.size if isinstance(piece, FilePart) else len(piece)


def _whole(read: bytes, piece: FilePart, count: int) -> bytes:
    if len(read) != count:
        raise OSError(f"{piece.path} is shorter than it was")
    return read


def spool(write: Callable[[IO[bytes]], object]) -> Contents:
    """Return what ``write`` writes into a temporary file: in memory if it is small, else mapped.

    The file has no name, and is deleted with the contents.

    Raises:
        OSError: the folder for temporary files (``TMPDIR``) does not take it.
    """
    try:
        with tempfile.TemporaryFile() as file:
            write(file)
            file.flush()
            size = file.seek(0, io.SEEK_END)
            if size <= SMALL_BYTES:
                file.seek(0)
                return Contents(file.read())
            return Contents(memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)))
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = tempfile.gettempdir()
        raise


# Limits of archives: entries; unpacked bytes as a multiple of the packed ones, beyond `_ANY_BYTES`.
_MAX_ENTRIES, _MAX_RATIO, _ANY_BYTES = 100_000, 20, 64 * 1024 * 1024


@contextlib.contextmanager
def open_archive(file: IO[bytes], kind: str) -> Iterator[zipfile.ZipFile]:
    """Open an archive to read from it, for a ``with`` statement.

    Args:
        file: the archive.
        kind: expected kind of file, for messages.

    Raises:
        InvalidInputError: it is no archive, or is damaged, here or within the statement; or it has
            a name twice, or is far larger when unpacked.
        OSError: it cannot be read.
    """
    with convert_parse_errors(kind), zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {one.filename for one in entries}
        if len(names) < len(entries) or len(names) > _MAX_ENTRIES:
            raise ValueError(f"it has {len(entries):,} entries of {len(names):,} names")
        unpacked, packed = sum(one.file_size for one in entries), file.seek(0, os.SEEK_END)
        if unpacked > _ANY_BYTES + _MAX_RATIO * packed:
            raise ValueError(
                f"its {packed:,} bytes unpack to {unpacked:,}, which looks like an attack; if it "
                "is right, pack it again without compression"
            )
        yield archive


@contextlib.contextmanager
def convert_parse_errors(kind: str) -> Iterator[None]:
    """Turn all errors of parsing untrusted bytes, but not of storage, into one.

    Args:
        kind: expected kind of file, for messages.

    Raises:
        InvalidInputError: the bytes are invalid.
    """
    try:
        yield
    except (HorovodSparkError, MemoryError):
        raise
    except Exception as error:  # zipfile raises a dozen types
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
