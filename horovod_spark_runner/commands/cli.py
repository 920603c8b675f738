"""The console command ``horovod-spark-runner``; each sub-command's module is loaded at use."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .._version import __version__
from ..errors import HorovodSparkError, printable

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_PROGRAM = "horovod-spark-runner"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (that of the process by default); return the exit code.

    0 means success, 1 a problem that was found or an error, 2 invalid arguments.
    """
    arguments = make_parser().parse_args(argv)
    module, _, function = arguments.run.partition(":")
    run: Callable[[argparse.Namespace], int] = getattr(
        importlib.import_module(module, __package__), function
    )
    try:
        return run(arguments)
    except (HorovodSparkError, OSError) as error:  # storage that fails is no bug, either
        print(f"{_PROGRAM}: error: {printable(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog=_PROGRAM)
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for register in _REGISTERED:
        register(commands)
    return parser


def _register_doctor(commands: Commands) -> None:
    text = "check this environment: Python, Java, Spark, MPI, Horovod and how they fit together"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("--no-run", action="store_true", help="leave out the allreduce of 2 ranks")
    parser.set_defaults(run=".doctor:command")


def _register_data(commands: Commands) -> None:
    text = "list or clear materialized data"
    actions = commands.add_parser("data", help=text, description=text).add_subparsers(
        metavar="ACTION", required=True
    )
    folder = "cache directory (data_dir), or a run directory; a path or URL"
    listing = actions.add_parser("list", help="show what is materialized in a folder")
    listing.add_argument("folder", help=folder)
    listing.set_defaults(run=".data:list_command")
    clearing = actions.add_parser("clear", help="delete what was not used for a time")
    clearing.add_argument("folder", help=folder)
    clearing.add_argument(
        "--older-than",
        metavar="AGE",
        required=True,
        help="such as 7d, 12h or 30m; longer than any run that still reads it. 0s deletes all",
    )
    clearing.set_defaults(run=".data:clear_command")


def _register_install_horovod(commands: Commands) -> None:
    from .build_horovod import add_arguments

    text = "build Horovod for this environment's TensorFlow and Open MPI, once, and install it"
    parser = commands.add_parser("install-horovod", help=text, description=text)
    add_arguments(parser)
    parser.set_defaults(run=".build_horovod:command")


def _register_pack(commands: Commands) -> None:
    text = "make an archive of this environment that Spark unpacks on its executors"
    parser = commands.add_parser("pack", help=text, description=text)
    parser.add_argument("output", metavar="OUT", help="file to write: .tar.gz or .tgz")
    parser.add_argument("--force", action="store_true", help="overwrite it")
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out matching files, such as 'lib/*/site-packages/scipy/*'; repeat for more",
    )
    parser.add_argument(
        "--python-prefix",
        metavar="PATH",
        help="where the executors have the Python that this environment was made with (as here)",
    )
    parser.add_argument(
        "--compress-level", type=int, default=4, metavar="0-9", help="0 is fast, 9 is small (4)"
    )
    parser.set_defaults(run=".pack:command")


def _register_runs(commands: Commands) -> None:
    text = "show what became of runs: state, progress, checkpoints, attempts, how to resume"
    actions = commands.add_parser("runs", help=text, description=text).add_subparsers(
        metavar="ACTION", required=True
    )
    showing = actions.add_parser("show", help="show all of one run")
    showing.add_argument("run_dir", help="its run directory; a path or URL")
    showing.set_defaults(run=".runs:show_command")
    listing = actions.add_parser("list", help="show a line for each run in a folder")
    listing.add_argument("folder", help="the folder that holds run directories; a path or URL")
    listing.set_defaults(run=".runs:list_command")
    for parser in (showing, listing):
        parser.add_argument("--json", action="store_true", help="print JSON")


def _register_report(commands: Commands) -> None:
    text = "write a page of what a run did: curves, where its time went, attempts, settings"
    parser = commands.add_parser("report", help=text, description=text)
    parser.add_argument(
        "run_dir", nargs="+", help="its run directory, a path or URL; several are compared"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="HTML file to write (report.html in the run directory; of several runs, here)",
    )
    parser.set_defaults(run=".runs:report_command")


def _register_plan(commands: Commands) -> None:
    text = "predict a finished run's training for other numbers of ranks and networks"
    parser = commands.add_parser("plan", help=text, description=text)
    parser.add_argument("run_dir", help="the run directory, a path or URL")
    parser.add_argument(
        "--network",
        action="append",
        metavar="SPEED",
        help="network between hosts, such as 10gbit; repeat for more (1, 10 and 100gbit)",
    )
    parser.add_argument("--ranks", metavar="N,N", help="numbers of ranks (1 to 4096)")
    parser.add_argument("--ranks-per-host", type=int, metavar="N", help="as in the run (default)")
    parser.add_argument("--cores-per-host", type=int, metavar="N", help="one per rank (default)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument("--output", metavar="FILE", help="write a .json or .html file instead")
    parser.set_defaults(run=".plan:command")


def _register_tune(commands: Commands) -> None:
    text = "show what became of searches for the best parameters"
    actions = commands.add_parser("tune", help=text, description=text).add_subparsers(
        metavar="ACTION", required=True
    )
    showing = actions.add_parser("show", help="show the trials of one study, and the best")
    showing.add_argument("study_dir", help="its directory")
    showing.add_argument("--json", action="store_true", help="print JSON")
    showing.set_defaults(run=".tune:show_command")


def _register_parameters(commands: Commands) -> None:
    text = "print every argument and setting, what it can be, its default and what it does"
    parser = commands.add_parser("parameters", help=text, description=text)
    parser.set_defaults(run=".parameters:command")


# One function per sub-command: it adds a parser and names ".module:function", which takes the
# parsed arguments and returns the exit code.
_REGISTERED: tuple[Callable[[Commands], None], ...] = (
    _register_install_horovod,
    _register_doctor,
    _register_pack,
    _register_runs,
    _register_report,
    _register_plan,
    _register_data,
    _register_tune,
    _register_parameters,
)


if __name__ == "__main__":
    sys.exit(main())
