"""Worker: the process of one rank, started by its slot or forked by a prefork process.

It imports the frameworks at once, while Spark's tasks still find each other and mpirun starts. Then
it takes the environment that mpirun made for its rank, joins MPI, runs the function and writes its
outcome to the rank's private directory. It talks to its slot over a Unix socket, one JSON object
per line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import EnvironmentProblem, LaunchError, on_one_line
from ...frameworks import FRAMEWORKS, quiet_imports
from ...serialize import Pickler, pickle_value
from ...typed_json import parse
from ..protocol.command import SET_TORCH_VARIABLES, SIDE_PROCESS, SPARK_FILES, TORCH_VARIABLES
from ..protocol.messages import Begin, Finished, Started
from ..protocol.network import ADDRESS, LOOPBACK
from ..protocol.outcome import (
    CRASH_FILE,
    OUTCOME_FILE,
    RAISED,
    RESULT_FILE,
    STACKS_FILE,
    STACKS_SIGNAL,
    Failure,
    describe_exception,
)
from ..protocol.processes import RANK_NAME, name_process
from . import reporting, side_process
from .affinity import bind_to_cores

_MODULE = "pyspark.core.files"


def _set_spark_files(folder: str) -> None:
    """Make ``pyspark.SparkFiles`` find files in ``folder``, where Spark has put them.

    PySpark is not imported for that, which takes half a second.
    """
    if _MODULE in sys.modules:
        _set_folder(sys.modules[_MODULE], folder)
    else:
        sys.meta_path.insert(0, _Importer(folder))


def _set_folder(module: ModuleType, folder: str) -> None:
    module.SparkFiles._root_directory = folder
    module.SparkFiles._is_running_on_worker = True


class _Importer(MetaPathFinder, Loader):
    """Sets the folder when the module is imported."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _set_folder(module, self._folder)


def main() -> None:
    """Run one rank: ``python -m …cluster.worker.main FD DIRECTORY PAYLOAD MODULE...``."""
    descriptor, directory, payload = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    slot = socket.socket(fileno=descriptor)
    slot.set_inheritable(False)
    prepare(directory)
    began = time.monotonic()
    import_ahead(sys.argv[4:])
    os._exit(work(slot, directory, payload, time.monotonic() - began))


def prepare(directory: Path) -> None:
    """Give this process its name and signals: Python stacks on request, no end by Ctrl-C."""
    name_process(RANK_NAME)
    # Ctrl-C on a terminal reaches the whole foreground group; ending ranks is the driver's call.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _show_crashes(directory)
    # Written by C code, so also while the main thread waits inside a collective.
    stacks = (directory / STACKS_FILE).open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)


def _show_crashes(directory: Path) -> None:
    """Write Python's stacks if this process crashes; C's alone do not show the line."""
    faulthandler.enable((directory / CRASH_FILE).open("a"), all_threads=True)


def work(slot: socket.socket, directory: Path, payload: Path, import_seconds: float) -> int:
    """Run one rank, from the slot's start message to the outcome.

    Args:
        slot: connection to the slot.
        directory: private directory of the rank.
        payload: file with the pickled call.
        import_seconds: seconds of the frameworks' import.

    Returns:
        The code to exit with, at once: frameworks' and Horovod's threads make an orderly
        interpreter exit slow and fragile.
    """
    line = slot.makefile("r", encoding="utf-8").readline()
    if not line:  # the slot has ended
        return 1
    begin = parse(line, Begin)
    os.environ.update(begin.environment)
    if SPARK_FILES in os.environ:
        _set_spark_files(os.environ[SPARK_FILES])
    bind_to_cores(os.environ)
    slot.settimeout(1.0)  # reports are advice: none is waited for
    reporting.connect(slot)
    code = _run(directory, payload, begin.rank, begin.size, import_seconds)
    _flush()
    return code


def import_ahead(modules: Iterable[str]) -> None:
    """Import the modules that a rank will need, without joining MPI."""
    import mpi4py

    # Importing mpi4py.MPI must not join the world: its environment is not known yet, and a process
    # that joins without one becomes a world of one rank.
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    with quiet_imports():
        # MPI first: Horovod then uses the library that is loaded, that of this environment, and
        # not the one at the path it was built with, which another host may have or may not have.
        for module in ("mpi4py.MPI", *modules):
            # Only to save time: a missing or broken module is reported by the function's import.
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)
    # The garbage collector need not visit modules, which live for ever: visiting them would copy
    # their pages in every forked worker.
    gc.freeze()


def _join_world(rank: int, size: int) -> None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        path = os.environ.get("LD_LIBRARY_PATH")
        others = (
            f". LD_LIBRARY_PATH={path} comes before the libraries of this environment: if one of "
            "its folders holds a library of another MPI, take it out, or put "
            f"{sys.prefix}/lib before it"
        )
        raise EnvironmentProblem(
            f"MPI cannot be loaded: {on_one_line(error)}{others if path else ''}"
        ) from error
    MPI.Init_thread(MPI.THREAD_MULTIPLE)  # Horovod calls MPI from its own thread
    actual = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if actual != (rank, size):
        raise LaunchError(
            f"this process was to be rank {rank} of {size}, but MPI made it rank {actual[0]} of "
            f"{actual[1]}; was MPI initialised by an import, or had mpirun ended?"
        )


def _set_torch_variables() -> None:
    """Set the variables by which ``torch.distributed.init_process_group`` finds the other ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    meeting = None
    if world.Get_rank() == 0:
        address = os.environ.get(ADDRESS, LOOPBACK)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as free:  # torch binds it again
            free.bind((address, 0))
            meeting = address, free.getsockname()[1]
    address, port = world.bcast(meeting)
    local_rank, local_size = (os.environ[f"OMPI_COMM_WORLD_LOCAL_{x}"] for x in ("RANK", "SIZE"))
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        # Only its own GPUs are visible: cuda:{LOCAL_RANK} is one, as for TorchDistributor.
        local_rank, local_size = "0", "1"
    values = (world.Get_rank(), world.Get_size(), local_rank, local_size, address, port)
    os.environ.update(zip(TORCH_VARIABLES, map(str, values), strict=True))


def _run(directory: Path, payload: Path, rank: int, size: int, import_seconds: float) -> int:
    failure: Failure | None = None
    timings = {"import": import_seconds}
    try:
        began = time.monotonic()
        # Without Python's handler during MPI_Init, Open MPI shows C's stack of a crash as well.
        faulthandler.disable()
        if os.environ.pop(SIDE_PROCESS, None) and rank == 0:
            side_process.start(payload)
        _join_world(rank, size)
        _show_crashes(directory)
        # A program of the user's, not a training.
        if is_program := bool(os.environ.pop(SET_TORCH_VARIABLES, None)):
            _set_torch_variables()
        timings["mpi_init"] = time.monotonic() - began
        # The caller's script is another one: lookups in __main__ must not find this module.
        sys.modules["__main__"] = ModuleType("__main__")
        with payload.open("rb") as stream:
            function, args, kwargs = pickle.load(stream)
        reporting.send(Started())
        with _end_forks():
            result = call(function, args, kwargs, is_program=is_program)
        reporting.send(Finished())
        _write_result(directory / RESULT_FILE, result)
    except BaseException as error:  # also SystemExit, but for a program's exit with code 0
        failure = describe_failure(error)
    _write_outcome(directory, failure, timings)
    if failure is None:
        _leave_world()
        return 0
    _abort_world()
    return 1


def call(
    function: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    *,
    is_program: bool,
) -> Any:
    """Call a rank's function; a program may exit with code 0, which mpirun takes for success."""
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        if not is_program or error.code not in (None, 0):
            raise
        return None


@contextlib.contextmanager
def _end_forks() -> Iterator[None]:
    """End a process that the function forked when it leaves the function, as Python would.

    It is not a rank: it must neither write an outcome nor take part in the end of the MPI world.
    """
    rank_pid = os.getpid()
    code = 0
    try:
        yield
    except SystemExit as error:
        if os.getpid() == rank_pid:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        if os.getpid() == rank_pid:
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    if os.getpid() != rank_pid:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            stream.flush()


def _write_result(path: Path, value: object) -> None:
    with path.open("wb") as stream:
        try:
            Pickler(stream).dump(value)
        except OSError:
            raise  # the disk is full, for example
        except Exception as error:
            raise TypeError(
                f"the function returned a {type(value).__qualname__} that cannot be pickled, so "
                f"it cannot be sent to the driver: {error}"
            ) from error


def describe_failure(error: BaseException) -> Failure:
    """Return ``error`` as a value that survives this process."""
    name, message, text = describe_exception(error)
    try:
        exception = pickle_value(error)
        pickle.loads(exception)  # some exceptions pickle but cannot be built again
    except Exception:
        exception = None
    return Failure(RAISED, time.time(), message, name, text, exception)


def _write_outcome(directory: Path, failure: Failure | None, timings: dict[str, float]) -> None:
    # Written to another file and renamed: the slot never sees half an outcome of a killed rank.
    partial = directory / f"{OUTCOME_FILE}.partial"
    with partial.open("wb") as stream:
        pickle.dump((failure, timings), stream, protocol=5)
    partial.rename(directory / OUTCOME_FILE)


def _leave_world() -> None:
    for framework in FRAMEWORKS.values():
        module = sys.modules.get(framework.horovod)
        # The module of a framework that Horovod was built without can be imported, but is empty.
        if module is not None and hasattr(module, "init") and module.is_initialized():
            module.shutdown()
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def _abort_world() -> None:
    # An uncaught exception on one rank must not leave the others waiting in a collective.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            # Open MPI prints lines about the abort; the driver reports the reason.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        mpi.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main()
