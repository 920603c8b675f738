"""``horovod-spark-runner plan``: what more ranks would have brought a run."""

from __future__ import annotations

import argparse
import json
import time

from ..errors import InvalidInputError
from ..planning.call import NETWORKS, RANKS, plan_of
from ..planning.from_run import measured_by_run
from ..rundir.directory import RunDirectory


def command(arguments: argparse.Namespace) -> int:
    """Plan from a run."""
    directory = RunDirectory(arguments.run_dir)
    plan = plan_of(
        directory.location.name,
        measured_by_run(directory, time.time()),
        arguments.network or NETWORKS,
        _numbers(arguments.ranks) if arguments.ranks else RANKS,
        arguments.ranks_per_host,
        arguments.cores_per_host,
    )
    if arguments.output is not None:
        plan.write(arguments.output)
        print(arguments.output)
    else:
        print(json.dumps(plan.as_json(), indent=1) if arguments.json else plan)
    return 0


def _numbers(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError as error:
        raise InvalidInputError(
            f"--ranks must be whole numbers with commas between them, got {given!r}"
        ) from error
