"""SHA-256 checksums, which detect damaged files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..typed_json import load_json
from .contents import Contents, Sink
from .paths import check_name

if TYPE_CHECKING:  # it needs pyarrow, and what reads exported pipelines does not
    from .filesystem import Location

_BEGIN = '{"sha256": "%s", "content": '


def compute_checksum(data: bytes | memoryview | Contents) -> str:
    """Return the SHA-256 of some contents, in hexadecimal digits."""
    digest = hashlib.sha256()
    for part in data.parts() if isinstance(data, Contents) else (data,):
        digest.update(part)
    return digest.hexdigest()


def seal(text: str) -> str:
    """Return JSON that holds the JSON ``text`` and its checksum."""
    return _BEGIN % compute_checksum(text.encode()) + text + "}"


def unseal(text: str) -> Any:
    """Return the content of JSON that `seal` made.

    Raises:
        ValueError: it is damaged, or was not made by `seal`.
    """
    content = text[len(_BEGIN % compute_checksum(b"")) : -1]
    if not text.startswith(_BEGIN.partition("%")[0]):
        raise ValueError("it is damaged, or of another format")
    if text != seal(content):
        raise ValueError("it is damaged: its SHA-256 is not the one recorded")
    return load_json(content)


def parse_checksums(value: object) -> dict[str, str]:
    """Return the checksums of a folder's files by name, as parsed JSON holds them.

    Raises:
        ValueError: it is something else, or a name leads out of the folder.
    """
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError("it holds no sums of files")
    return {check_name(name): digest for name, digest in value.items()}


def write_with_checksum(
    write: Callable[[Callable[[Sink], None]], None], fill: Callable[[Sink], object]
) -> str:
    """Write a file and return its checksum.

    Args:
        write: `Location.write_stream` or `Location.write_stream_in_place` of the file.
        fill: writes the contents.

    Raises:
        OSError: it cannot be written.
    """
    digest = hashlib.sha256()

    def summing(sink: Sink) -> None:
        sink.seen = digest.update
        fill(sink)

    write(summing)
    return digest.hexdigest()


def read_verified_file(folder: Location, name: str, sums: Mapping[str, str]) -> Contents:
    """Return the contents of the file ``name``, verified by ``sums``; large ones are mapped.

    They do not change if the file does.

    Raises:
        ValueError: it is missing or damaged.
        OSError: it cannot be read, or the folder for temporary files has no room for it.
    """
    digest = hashlib.sha256()
    try:
        recorded = sums[name]
        contents = folder.join(name).spool(digest.update)
    except (FileNotFoundError, KeyError) as error:
        raise ValueError(f"{name} is missing") from error
    _check_sum(name, digest.hexdigest(), recorded)
    return contents


def verify_file(folder: Location, name: str, sums: Mapping[str, str]) -> None:
    """Verify the file ``name`` by ``sums``, without holding it in memory.

    Raises:
        ValueError: it is missing or damaged.
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        recorded = sums[name]
        folder.join(name).scan(digest.update)
    except (FileNotFoundError, KeyError) as error:
        raise ValueError(f"{name} is missing") from error
    _check_sum(name, digest.hexdigest(), recorded)


def _check_sum(name: str, actual: str, recorded: str) -> None:
    if actual != recorded:
        raise ValueError(f"{name} is damaged: its SHA-256 is not the one recorded")
