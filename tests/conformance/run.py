"""Trains some cases and prints what differs: ``python -m tests.conformance.run CASE…``.

A name may be a pattern (``metric*``) or a title of the table ("Losses and weights"); without one,
all cases are trained. With ``--one`` first, only one rank is (one process, no MPI).
"""

from __future__ import annotations

import fnmatch
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from . import compare
from .supervise import differences, start
from .table import CASES, GROUPS
from .world import PARTS

CHECKS: dict[str, tuple[Callable[..., list[str]], tuple[str, ...]]] = {
    "one rank as fit": (compare.one_rank, ("fit", "one-0")),
    "two ranks as one": (compare.two_ranks, ("one-0", "two-0", "two-1")),
    "prediction": (compare.prediction, ("one-0",)),
}


def main(patterns: list[str]) -> int:
    """Print the differences; return how many checks failed."""
    only_one = patterns[:1] == ["--one"]
    patterns = patterns[only_one:]
    checks = {
        check: (function, parts)
        for check, (function, parts) in CHECKS.items()
        if not (only_one and "two-0" in parts)
    }
    chosen = [
        case
        for title, cases in GROUPS.items()
        for case in cases
        if not patterns
        or title in patterns
        or any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)
    ]
    if not chosen:
        print("no such case; there are", ", ".join(case.name for case in CASES))
        return 1
    failed, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        worlds = start(Path(folder), chosen, ["one"] if only_one else PARTS)
        try:
            for case in chosen:
                for check, (function, parts) in checks.items():
                    found = differences(case, worlds, function, *parts)
                    failed += bool(found)
                    print(f"{'FAIL' if found else 'ok  '} {case.name}: {check}", flush=True)
                    for text in found:
                        print("       ", text.replace("\n", "\n        "), flush=True)
        finally:
            for world in worlds.values():
                world.stop()
    print(f"{failed} of {len(chosen) * len(checks)} differ, {time.monotonic() - began:.0f} s")
    return failed


if __name__ == "__main__":
    raise SystemExit(min(1, main(sys.argv[1:])))
