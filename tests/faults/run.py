"""A series of random faults by hand: ``python -m tests.faults.run --seed 1 --count 100``.

Every run of a training of 60 steps takes up to 20 faults; as many runs as the count needs. Ends
with an error if a run ends otherwise than an undisturbed one, or leaves a process or file behind.
``--write`` puts the table into ``docs/reliability.md``.
"""

from __future__ import annotations

import argparse
import bisect
import os
import shutil
import statistics
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.leftovers import MARK, await_nothing_left

from .injection import BEGUN, HARMLESS_KINDS, KINDS, SILENT_KINDS, choose_faults, note_of
from .training import EVERY, STEPS, assert_same_end, make_frame, train

PER_RUN = 20
SILENCE = 15.0
STALL = 20.0  # longer: a stopped Python worker is to be told by its silence
DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
HEAD = "| fault | count | to the cause, median | worst | to the first new step, median | worst |"


class Times:
    """How long it took after each kind of fault until it was known, and until a step was done."""

    def __init__(self) -> None:
        self._causes: dict[str, list[float]] = defaultdict(list)
        self._steps: dict[str, list[float]] = defaultdict(list)
        self._counts: dict[str, int] = defaultdict(int)
        self.steps_again = 0  # that were trained again

    def add(self, faults: Sequence[Any], notes: Path, attempts: Sequence[Any]) -> None:
        ends = sorted(attempt.ended for attempt in attempts)
        steps = sorted(int(p.name.removeprefix(BEGUN)) / 1e9 for p in notes.glob(f"{BEGUN}*"))
        for fault in faults:
            self._counts[fault.kind] += 1
            moment = note_of(str(notes), fault).stat().st_mtime
            if fault.kind not in HARMLESS_KINDS:
                hit = bisect.bisect(ends, moment)
                self._causes[fault.kind].append(ends[hit] - moment)
                self.steps_again += max(0, fault.step - attempts[hit + 1].first_step)
                later = steps[bisect.bisect(steps, moment) :]
                if later:  # after the last step of all there is none
                    self._steps[fault.kind].append(later[0] - moment)

    def table(self) -> str:
        lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
        for kind, count in sorted(self._counts.items()):
            cells = [kind, str(count)]
            for seconds in (self._causes[kind], self._steps[kind]):
                cells += _summary(seconds) if seconds else ["no restart", ""]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def _summary(seconds: Sequence[float]) -> list[str]:
    return [f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of steps, ranks and kinds (0)")
    parser.add_argument("--count", type=int, default=20, help="faults in all (20)")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    arguments = parser.parse_args()
    # What is left behind is told by these from what others have on this machine.
    os.environ[MARK] = uuid.uuid4().hex
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="f-", dir="/tmp")
    tempfile.tempdir = None
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = spark.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    frame = make_frame(session).cache()
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder, "undisturbed")
        train(frame, undisturbed)
        for number, begin in enumerate(range(0, arguments.count, PER_RUN)):
            count = min(PER_RUN, arguments.count - begin)
            # Each of the silent ones takes its whole timeout.
            kinds = 2 * KINDS + SILENT_KINDS + HARMLESS_KINDS
            faults = choose_faults(arguments.seed + number, count, STEPS, kinds)
            notes = Path(folder, f"faults-{number}")
            notes.mkdir()
            run_dir = Path(folder, f"run-{number}")
            run = train(
                frame,
                run_dir,
                faults,
                str(notes),
                launch={"stall_timeout": STALL, "heartbeat_timeout": SILENCE},
                # A machine under load may look stalled.
                restarts={"max_restarts": 2 * count},
            )
            assert_same_end(run_dir, undisturbed)
            await_nothing_left(15)
            times.add(faults, notes, run.summary.attempts)
            print(f"{begin + count} faults: the same end", flush=True)
    session.stop()
    shutil.rmtree(os.environ["TMPDIR"])
    words = (
        f"`python -m tests.faults.run {' '.join(sys.argv[1:])}`: {arguments.count} faults in "
        f"{number + 1} runs of {STEPS} steps, every run with the weights of an undisturbed one to "
        f"the bit, no run lost, nothing left behind; {times.steps_again} steps were trained again, "
        f"with a checkpoint every {EVERY}."
    )
    print(f"\n{words}\n\n{times.table()}")
    if arguments.write:
        before = DOCUMENT.read_text().partition("\n`python -m tests.faults.run")[0]
        DOCUMENT.write_text(f"{before}\n{words}\n\n{times.table()}")


if __name__ == "__main__":
    main()
