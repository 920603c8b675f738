"""The table of the checks, printed and written as it grows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MET, NOT_MET, NEEDS_GPU = "met", "NOT MET", "no GPU here"
HEAD = "| check | figure | goal | verdict |\n|---|---|---|---|"
BAD = (NOT_MET, "failed", "out of time")


def judge(met: bool, *, needs_gpu: bool, has_gpu: bool) -> str:
    """Return the verdict on a figure."""
    if needs_gpu and not has_gpu:
        return NEEDS_GPU
    return MET if met else NOT_MET


def line(row: Mapping[str, str]) -> str:
    """Return a row in Markdown."""
    cells = (text.replace("|", "\\|").replace("\n", " ") for text in row.values())
    return f"| {' | '.join(cells)} |"


def write_section(document: Path, result: Mapping[str, Any]) -> None:
    """Fill the section "GPU" of a document with a result, in place of an earlier one."""
    where = "; ".join(result["gpus"]) or "a machine without a GPU"
    section = "\n".join(
        [
            "## GPU\n",
            f"`scripts/gpu_check --write`: {result['date']}, {where}; {result['seconds']:.0f} s.\n",
            HEAD,
            *map(line, result["rows"]),
        ]
    )
    text = document.read_text()
    made, found = re.subn(r"(?ms)^## GPU$.*?(?=^## |\Z)", lambda _: section + "\n\n", text)
    if not found:
        made = f"{text.rstrip()}\n\n{section}\n"
    document.write_text(made.rstrip() + "\n")


class Table:
    """Prints a line for each row and keeps a file of all of them."""

    def __init__(self, path: Path, gpus: list[str]) -> None:
        self._path, self._started = path, time.monotonic()
        self._rows: list[dict[str, str]] = []
        self._checks: dict[str, float] = {}
        self._about = {"gpus": gpus, "date": time.strftime("%Y-%m-%d")}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        print(HEAD, flush=True)

    def add(self, check: str, figure: str, goal: str, verdict: str) -> None:
        row = {"check": check, "figure": figure, "goal": goal, "verdict": verdict}
        self._rows.append(row)
        print(line(row), flush=True)
        self._write()

    def add_seconds(self, check: str, seconds: float) -> None:
        """Keep how long a check took."""
        self._checks[check] = round(seconds, 1)
        self._write()

    def finish(self) -> int:
        """Print the sums; return the exit status: 1 if a row is bad."""
        counts: dict[str, int] = {}
        for row in self._rows:
            counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
        text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        print(f"\n{len(self._rows)} rows: {text}; {time.monotonic() - self._started:.0f} s")
        return int(any(counts.get(verdict) for verdict in BAD))

    def _write(self) -> None:
        seconds = round(time.monotonic() - self._started, 1)
        content = {**self._about, "seconds": seconds, "checks": self._checks, "rows": self._rows}
        self._path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
