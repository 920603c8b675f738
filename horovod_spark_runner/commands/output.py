"""Output of commands: what they print, and the file they write, checked before the work."""

from __future__ import annotations

from ..errors import InvalidInputError, one_line
from ..storage.filesystem import Location


def show(*lines: str) -> None:
    """Print lines of what storage may hold: a terminal obeys nothing in them, and each is one."""
    print(*map(one_line, lines), sep="\n", flush=True)


def output_file(given: str) -> Location:
    """Return the file that ``--output`` names.

    Raises:
        InvalidInputError: it is a folder.
    """
    file = Location(given)
    if file.is_folder:
        raise InvalidInputError(f"--output {given} is a folder; name the file to write in it")
    return file
