"""A Python that runs scripts one after the other, in one Spark session if they use one.

Each line that it reads is a list in JSON: the path of a script, and its arguments. It runs that
with names of its own, writes what it prints into files in its own folder (``.out`` and ``.err``),
and answers ``0``, or ``1`` if the script has failed. A script that stops the session leaves it to
the next one: the last one's end is the session's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from pyspark.sql import SparkSession

_stop = SparkSession.stop
_FOLDER = Path.cwd()  # which scripts may leave


def main() -> None:
    """Run scripts until there are no more, then stop their session."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    SparkSession.stop = lambda session: None
    for line in sys.stdin:
        print(_run(*json.loads(line)), file=answers)
    if (session := SparkSession.getActiveSession()) is not None:
        _stop(session)


def _run(script: str, *arguments: str) -> int:
    place = _FOLDER / Path(script).stem
    with open(f"{place}.out", "wb") as out, open(f"{place}.err", "wb") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)  # as for a script that Python is started with
    try:
        runpy.run_path(script, run_name="__main__")
    except (Exception, SystemExit):
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
