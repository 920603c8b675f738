"""``horovod-spark-runner plan``: what more ranks would bring a script's training, or a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..errors import InvalidInputError
from ..planning.asked import Asked
from ..planning.call import plan_of
from ..planning.from_run import measured_by_run
from ..planning.plan import TrainingPlan, plan_file
from ..planning.script import plan_script
from ..rundir.directory import RunDirectory
from ..storage.filesystem import Location
from .output import output_file

# What files of a run, or of models and rows, are called.
_DATA = (".json", ".jsonl", ".html", ".keras", ".h5", ".pt", ".npz", ".parquet", ".log")
# Of measuring, and so for scripts only: the options, and what they are called in `Asked`.
_MEASURING = {"sample_rows": "--sample-rows", "noise_scale": "--noise-scale"}


def command(arguments: argparse.Namespace) -> int:
    """Plan the training of a script, or from a run."""
    script = script_of(arguments.target)
    asked = Asked(**_asked(arguments))
    # Where it is must not change with the working directory of a script.
    output = None if arguments.output is None else str(_output(arguments.output))
    shown = sys.stdout if script is None else _taken_output()
    plan = _of_run(arguments, asked) if script is None else _of_script(script, arguments, asked)
    if output is not None:
        plan.write(output)
        print(arguments.output, file=shown, flush=True)
    else:
        told = json.dumps(plan.as_json(), indent=1) if arguments.json else plan
        print(told, file=shown, flush=True)
    return 0


def _output(given: str) -> Location:
    """Return the file to write, which is looked at before minutes of measuring."""
    plan_file(given)
    return output_file(given)


def _taken_output() -> TextIO:
    """Return the standard output of this process, which writes to standard error from now on.

    Threads of a script, its ``atexit`` functions and its child processes go on after the plan. A
    standard output that is none of the process, as callers of `command` may have set, stays.
    """
    try:
        is_own = sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):  # closed, or without a file
        is_own = False
    if not is_own:
        return sys.stdout
    sys.stdout.flush()
    taken = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    return taken


def script_of(target: str) -> Path | None:
    """Return the script that is meant; ``None`` if it is a run directory.

    Raises:
        InvalidInputError: it is neither.
    """
    path = Path(target).expanduser()
    if path.suffix == ".ipynb":
        raise InvalidInputError(
            f"{target} is a notebook; call plan_training in it, with what run_training is given"
        )
    if path.is_file():
        if path.suffix in _DATA:
            raise InvalidInputError(
                f"{target} is neither a Python script (.py) nor the directory of a run"
            )
        return path
    if path.suffix == ".py" and not path.is_dir():
        raise InvalidInputError(f"there is no script {target}")
    return None


def _of_script(script: Path, arguments: argparse.Namespace, asked: Asked) -> TrainingPlan:
    return plan_script(script, arguments.script_arguments, asked, arguments.plan_dir)


def _of_run(arguments: argparse.Namespace, asked: Asked) -> TrainingPlan:
    given = [option for name, option in _MEASURING.items() if getattr(arguments, name)]
    given += ["--plan-dir"] * (arguments.plan_dir is not None)
    given += ["arguments after --"] * bool(arguments.script_arguments)
    if given:
        raise InvalidInputError(
            f"{', '.join(given)}: a plan from a run measures nothing; give a script instead of "
            f"{arguments.target}, or leave them out"
        )
    directory = RunDirectory(arguments.target)
    return plan_of(directory.location.name, measured_by_run(directory, time.time()), asked)


def _asked(arguments: argparse.Namespace) -> Mapping[str, Any]:
    given = {
        "networks": arguments.network,
        "ranks": None if arguments.ranks is None else _numbers(arguments.ranks),
        "ranks_per_host": arguments.ranks_per_host,
        "cores_per_host": arguments.cores_per_host,
        **{name: getattr(arguments, name) for name in _MEASURING},
    }
    return {name: value for name, value in given.items() if value is not None}


def _numbers(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError as error:
        raise InvalidInputError(
            f"--ranks must be whole numbers with commas between them, got {given!r}"
        ) from error
