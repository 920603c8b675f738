"""``horovod-spark-runner report``: a page of what a run did, or of two runs side by side."""

from __future__ import annotations

import argparse
import time

from ..report.runs.facts import read_facts
from ..report.runs.page import comparison_page, run_page
from ..rundir.directory import RunDirectory
from ..storage.filesystem import Location


def command(arguments: argparse.Namespace) -> int:
    """Write the report of one run, or of several."""
    places = [RunDirectory(place) for place in arguments.run_dir]
    runs = [read_facts(directory, time.time()) for directory in places]
    text = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    output = arguments.output
    if output is None:
        output = str(places[0].report) if len(places) == 1 else "report.html"
    Location(output).write_text(text)
    print(output)
    return 0
