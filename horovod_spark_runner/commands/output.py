"""Where a command writes to, seen before it does its work."""

from __future__ import annotations

from ..errors import InvalidInputError
from ..storage.filesystem import Location


def output_file(given: str) -> Location:
    """Return the file that ``--output`` names.

    Raises:
        InvalidInputError: it is a folder.
    """
    file = Location(given)
    if file.is_folder:
        raise InvalidInputError(f"--output {given} is a folder; name the file to write in it")
    return file
