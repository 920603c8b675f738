"""Plans and trains between hosts as it is told, one after the other.

A line of JSON on standard input asks: ``case``, the number of a model of ``planner.py``, ``where``,
what joins the hosts, and ``rounds``. A line of JSON on standard output answers with what
``planner.compare`` returns. The arguments are the master, a private folder, and this host's
address.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import put_into_spark
from peers.session import join
from planner import CASES, compare, make_rows


def main() -> None:
    master, folder, address = sys.argv[1:]
    tempfile.tempdir = folder
    spark = join(master, address)
    frame = put_into_spark(spark, *make_rows())
    for line in sys.stdin:
        asked = json.loads(line)
        found = compare(frame, CASES[asked["case"]], asked["where"], asked["rounds"])
        print(json.dumps([one._asdict() for one in found]), flush=True)


if __name__ == "__main__":
    main()
