"""SHA-256 sums, by which damaged files are told from whole ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs pyarrow, and what reads exported pipelines does not
    from .filesystem import Location

_BEGIN = '{"sha256": "%s", "content": '


def sum_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sealed(text: str) -> str:
    """Return JSON that holds the JSON ``text`` and its sum."""
    return _BEGIN % sum_of(text.encode()) + text + "}"


def unsealed(text: str) -> Any:
    """Return what the JSON holds that `sealed` made.

    Raises:
        ValueError: it is damaged, or was not made by `sealed`.
    """
    content = text[len(_BEGIN % sum_of(b"")) : -1]
    if not text.startswith(_BEGIN.partition("%")[0]):
        raise ValueError("it is damaged, or of another format")
    if text != sealed(content):
        raise ValueError("it is damaged: its SHA-256 is not the one recorded")
    return json.loads(content)


def copy_checked(source: Location, target: Location, wanted: str) -> None:
    """Copy the file ``source``, whose sum is ``wanted``, without holding it in memory.

    Raises:
        ValueError: it is missing or damaged; then there is no ``target``.
        OSError: it cannot be read, or not be written.
    """
    found = hashlib.sha256()
    try:
        source.copy_to(target, found.update)
    except FileNotFoundError as error:
        raise ValueError(f"{source.name} is missing") from error
    if found.hexdigest() != wanted:
        target.delete_file()
        raise ValueError(f"{source.name} is damaged: its SHA-256 is not the one recorded")


def read_checked(folder: Location, name: str, sums: Mapping[str, str]) -> bytes:
    """Return the contents of the file ``name``, whose sum is among ``sums``.

    Raises:
        ValueError: it is missing or damaged.
        OSError: it cannot be read.
    """
    return checked(name, lambda: folder.join(name).read_bytes(), sums)


def checked(name: str, read: Callable[[], bytes], sums: Mapping[str, str]) -> bytes:
    """Return what ``read`` gives of the file ``name``, whose sum is among ``sums``.

    Raises:
        ValueError: it is missing or damaged.
        OSError: it cannot be read.
    """
    try:
        data, wanted = read(), sums[name]
    except (FileNotFoundError, KeyError) as error:
        raise ValueError(f"{name} is missing") from error
    if sum_of(data) != wanted:
        raise ValueError(f"{name} is damaged: its SHA-256 is not the one recorded")
    return data
