"""``horovod-spark-runner report``: write a page about a run, or a comparison of several."""

from __future__ import annotations

import argparse
import time

from ..checkpoint.run_directory import RunDirectory
from ..errors import RunDirectoryError
from ..observe.report.facts import read_facts
from ..observe.report.run_page import comparison_page, run_page
from ..storage.contents import convert_parse_errors
from ..storage.filesystem import Location
from ..storage.folders import make_parent
from ..tune.directory import StudyDirectory
from .output import output_file, show


def command(arguments: argparse.Namespace) -> int:
    """Write the report of one run, or of several.

    Raises:
        RunDirectoryError: a folder holds no run; or holds a study.
        InvalidInputError: the report would take the place of a folder.
    """
    output = arguments.output
    if output is None and len(arguments.run_dir) > 1:
        output = "report.html"
    file = None if output is None else output_file(output)
    for path in arguments.run_dir:
        study = StudyDirectory(Location(path)) if Location(path).is_local else None
        if study is not None and study.record.exists():
            raise RunDirectoryError(
                f"{path} holds a study: horovod-spark-runner tune show {path} prints it; a "
                f"report is of one of its trials, in {study.trials}"
            )
    places = [RunDirectory(place) for place in arguments.run_dir]
    with convert_parse_errors(f"the records of a run in {', '.join(arguments.run_dir)}"):
        runs = [read_facts(directory, time.time()) for directory in places]
        text = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    file = file or places[0].report
    make_parent(file)
    file.write_text(text)
    show(str(output or file))
    return 0
