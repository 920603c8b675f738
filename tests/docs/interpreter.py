"""A Python that runs scripts one after the other, in one Spark session if they use one.

Each line that it reads is the path of a script. It runs that with names of its own, writes what it
prints beside it (``.out`` and ``.err``), and answers ``0``, or ``1`` if the script has failed.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Run scripts until there are no more, then stop their session."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        print(_run(Path(line.strip())), file=answers)
    from pyspark.sql import SparkSession

    if (session := SparkSession.getActiveSession()) is not None:
        session.stop()


def _run(script: Path) -> int:
    with script.with_suffix(".out").open("wb") as out, script.with_suffix(".err").open("wb") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
