"""Format numbers, durations and sizes for people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timezone


def number(value: float, digits: int = 4) -> str:
    """Return ``value`` to so many digits: ``"0.01234"``, ``"12,345"``, ``"1.2e-07"``."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        text = f"{value:.{max(0, min(digits, 3) - 1)}e}"
    elif size >= 10 ** (digits - 1) or float(value).is_integer():
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "−") if "e" not in text else text


def short(value: float) -> str:
    """Return ``value`` for a tick of an axis: ``"1.5M"``, ``"20k"``, ``"0.25"``, ``"1e-05"``."""
    size = abs(value)
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if bound <= size < 1e15:
            per = 1e3 if unit == "k" else bound
            return f"{value / per:.6g}{unit}".replace("-", "−")
    if size and (size < 1e-3 or size >= 1e15):
        return f"{value:.6g}".replace("e-0", "e-").replace("e+", "e")
    return f"{value:.6g}".replace("-", "−")


def duration(seconds: float) -> str:
    """Return a time span: ``"0.4 ms"``, ``"3.2 s"``, ``"4 min 5 s"``, ``"1 d 4 h"``."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 0:
        return "−" + duration(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, part_size, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // part_size
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    raise AssertionError(seconds)


def size(count: float) -> str:
    """Return a number of bytes: ``"512 B"``, ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{_of_three(count)} {unit}"
        count /= 1024
    return f"{_of_three(count)} TiB"


def _of_three(value: float) -> str:
    """Return ``value`` to three digits, or more where they are whole: ``"1.5"``, ``"1012"``."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    """Return ``part`` in per cent of ``whole``; empty if that is 0."""
    return f"{100 * part / whole:.3g} %" if whole else ""


def moment(seconds: float) -> str:
    """Return a time in seconds since the epoch, in UTC: ``"2026-01-31 12:00:05 UTC"``."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def shortened(text: str, length: int) -> str:
    """Return ``text``, cut in its middle if it has more than ``length`` characters."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return text[:head] + "…" + text[len(text) - (length - 1 - head) :]


def quote_all(names: Iterable[str]) -> str:
    """Return names in quotes, for messages."""
    return ", ".join(repr(name) for name in names)
