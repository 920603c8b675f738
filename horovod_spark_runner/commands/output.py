"""Output of commands: printed lines, and the file to write, checked before the work."""

from __future__ import annotations

import json
import math
from typing import Any

from ..errors import InvalidInputError, one_line
from ..storage.filesystem import Location


def show(*lines: str) -> None:
    """Print lines from storage, one each, without control characters."""
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
    """Return plain values as JSON, with ``null`` for numbers that are not finite."""
    return json.dumps(_finite(value), indent=1)


def _finite(value: Any) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
