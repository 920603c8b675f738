"""Writes a benchmark's results into its section of ``docs/benchmarks.md``."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
# Of tables made of rows of `goal`.
GOAL_HEAD = ["Ratio", "Measured", "Goal", "Met"]
HEAD = """# Benchmarks

Every table was made by one run of the script named above it, on one machine, so what it compares
had the same conditions. Machines differ and are shared: the ratios say more than the seconds.
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def goal(
    what: str, ratio: float, *, at_least: float | None = None, at_most: float | None = None
) -> list[str]:
    """Return a row: what was compared, what came out, the goal, and whether it is met. Pure."""
    if at_least is not None:
        wanted, met = f"≥ {at_least:g}", ratio >= at_least
    else:
        assert at_most is not None
        wanted, met = f"≤ {at_most:g}", ratio <= at_most
    return [what, f"{ratio:.2f}", wanted, "yes" if met else "**no**"]


def conditions() -> str:
    """Say when and on what the numbers were measured."""
    load = os.getloadavg()[0]
    return (
        f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}; load average at the end {load:.1f}."
    )


def present(title: str, script: str, text: str, write: bool) -> None:
    """Print a benchmark's result and, if asked to, write it into the document."""
    print(f"\n{text}")
    if write:
        write_section(title, script, text)


def write_section(title: str, script: str, body: str) -> None:
    """Put ``body`` under the heading ``title``, in place of what an earlier run left there."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else HEAD
    head, *sections = text.split("\n## ")
    kept = [section for section in sections if section.partition("\n")[0] != title]
    new = f"{title}\n\n`{script}`: {conditions()}\n\n{body.strip()}\n"
    parts = [head.rstrip(), *(section.rstrip() for section in kept), new.rstrip()]
    DOCUMENT.write_text("\n\n## ".join(parts) + "\n")
