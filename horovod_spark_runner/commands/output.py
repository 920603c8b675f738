"""Output of commands: what they print, and the file they write, checked before the work."""

from __future__ import annotations

import json
import math
from typing import Any

from ..errors import InvalidInputError, one_line
from ..storage.filesystem import Location


def show(*lines: str) -> None:
    """Print lines of what storage may hold: a terminal obeys nothing in them, and each is one."""
    print(*map(one_line, lines), sep="\n", flush=True)


def output_file(path: str) -> Location:
    """Return the file that ``--output`` names.

    Raises:
        InvalidInputError: it is a folder.
    """
    file = Location(path)
    if file.is_folder:
        raise InvalidInputError(f"--output {path} is a folder; name the file to write in it")
    return file


def json_text(value: Any) -> str:
    """Return plain values as JSON, in which what is no finite number is ``null``."""
    return json.dumps(_finite(value), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
