"""What binding ranks to cores is worth where there are more of them than cores.

Trains the models of ``planner.py`` on two and four ranks for each core of this host, as they are
bound and left to the scheduler (``OMP_PROC_BIND=false``), in turns, and compares their samples per
second. Run it with ``python benchmarks/crowded.py``, where nothing else runs; ``--write`` puts the
result into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from model import make_arrays, make_frame
from planner import CASES, rates_of
from report import GOAL_HEAD, goal, present, shown_command, table

# Of an epoch of each of the models.
STEPS = (600, 30, 120, 30, 15)
PER_CORE = (2, 4)
WAYS = {"bound": {}, "unbound": {"OMP_PROC_BIND": "false"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each way (2)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    frame = make_frame(*make_arrays(), cores=max(PER_CORE) * cores)
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case, steps in zip(CASES, STEPS, strict=True):
            for per_core in PER_CORE:
                rates: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(arguments.rounds):
                    for way, env in WAYS.items():
                        found = rates_of(frame, case, per_core * cores, Path(folder), steps, env)
                        rates[way] += found
                bound, unbound = (statistics.median(rates[way]) for way in WAYS)
                ratios.append(bound / unbound)
                numbers = (f"{bound:,.0f}", f"{unbound:,.0f}", f"{bound / unbound:.2f}")
                rows.append((case.name, str(per_core), *numbers))
                print(*rows[-1], sep=" | ", flush=True)
    frame.sparkSession.stop()
    head = ["model", "ranks per core", "samples/s bound", "unbound", "ratio"]
    goals = [
        goal("bound against unbound, median", statistics.median(ratios), at_least=1.0),
        goal("bound against unbound, least", min(ratios), at_least=0.95),
    ]
    text = (
        f"Medians of the epochs but the first, {arguments.rounds} trainings of each, in turns.\n\n"
        f"{table(head, rows)}\n\n{table(GOAL_HEAD, goals)}"
    )
    present("More ranks than cores", shown_command(), text, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
