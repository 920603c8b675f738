"""Bytes of a program's output to whole lines of text. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

# A line longer than this is cut into pieces, so that one program cannot fill the memory.
MAX_LINE_BYTES = 64 * 1024
# How lines of Open MPI's default error handler begin, and the first one of a notice.
_MPI_ERROR = re.compile(r"\[\S+:\d+\] \*\*\* *(.*)")
_END_OF_ANOTHER = "An error occurred in PMIx Event Notification"


class LineSplitter:
    """Collects output and gives back its complete lines.

    A line is decoded only when it is complete, so a character whose bytes arrive apart stays
    whole; a carriage return, as progress bars use it, ends a line too.

    Args:
        tail: how many of the last lines to remember.
    """

    def __init__(self, tail: int) -> None:
        self._pending = b""
        self._returned = False
        self.tail: deque[str] = deque(maxlen=tail)

    def feed(self, data: bytes) -> list[str]:
        """Take ``data`` and return the lines it completes, without their ends."""
        if self._returned:  # the line feed that belongs to a carriage return comes after it
            data = data.removeprefix(b"\n")
        self._returned = data.endswith(b"\r")
        pieces = (self._pending + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._pending = pieces.pop()
        while len(self._pending) > MAX_LINE_BYTES:
            cut = _character_boundary(self._pending, MAX_LINE_BYTES)
            pieces.append(self._pending[:cut])
            self._pending = self._pending[cut:]
        return self._remember(pieces)

    def finish(self) -> list[str]:
        """Return what is left when the output has ended."""
        rest, self._pending = self._pending, b""
        return self._remember([rest] if rest else [])

    def _remember(self, pieces: list[bytes]) -> list[str]:
        lines = [piece.decode("utf-8", "replace") for piece in pieces]
        self.tail.extend(line for line in lines if line.strip())
        return lines


class AbortNoticeFilter:
    """Drops what Open MPI prints in a rank that it ends because another one has ended.

    The driver names the cause; errors of MPI calls, which are printed alike, are kept.
    """

    def __init__(self) -> None:
        self._in_notice = False

    def filter(self, lines: Iterable[str]) -> list[str]:
        """Return ``lines``, of one rank and one after the other, without such notices."""
        kept = []
        for line in lines:
            if match := _MPI_ERROR.match(line):
                self._in_notice |= match[1] == _END_OF_ANOTHER
            else:
                self._in_notice = False
            if not self._in_notice:
                kept.append(line)
        return kept


def _character_boundary(data: bytes, limit: int) -> int:
    """Return the largest cut of at most ``limit`` bytes that splits no UTF-8 character."""
    cut = limit
    while cut > limit - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
