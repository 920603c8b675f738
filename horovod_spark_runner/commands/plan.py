"""``horovod-spark-runner plan``: predict a finished run's training for other numbers of ranks."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ..checkpoint.run_directory import RunDirectory
from ..errors import InvalidInputError
from ..planning.from_run import measure_from_run
from ..planning.plan import PlanOptions, build_plan, plan_file
from ..storage.contents import convert_parse_errors
from .output import output_file, show


def command(arguments: argparse.Namespace) -> int:
    """Plan from a run directory."""
    options = _plan_options(arguments)
    output = None
    if arguments.output is not None:
        plan_file(arguments.output)
        output = output_file(arguments.output)
    directory = RunDirectory(arguments.run_dir)
    with convert_parse_errors(f"the records of a run in {directory.location}"):
        measured = measure_from_run(directory, time.time())
    plan = build_plan(directory.location.name, measured, options)
    if output is not None:
        plan.write(str(output))
        show(arguments.output)
    else:
        text = json.dumps(plan.as_json(), indent=1) if arguments.json else str(plan)
        show(*text.split("\n"))
    return 0


def _plan_options(arguments: argparse.Namespace) -> PlanOptions:
    options: dict[str, Any] = {
        "networks": arguments.network,
        "ranks": None if arguments.ranks is None else _parse_numbers(arguments.ranks),
        "ranks_per_host": arguments.ranks_per_host,
        "cores_per_host": arguments.cores_per_host,
    }
    return PlanOptions(**{name: value for name, value in options.items() if value is not None})


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInputError(
            f"--ranks must be integers with commas between them, got {text!r}"
        ) from error
