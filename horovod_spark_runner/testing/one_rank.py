"""One rank in this process, in place of those that Spark and mpirun start."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from ..cluster.driver.coordinator import Observer
from ..cluster.driver.launch import using_launcher
from ..cluster.driver.result import RunResult
from ..cluster.protocol.messages import Envelope, Notice, RankReport, Started, from_driver
from ..cluster.protocol.outcome import RankOutcome, failure_error
from ..cluster.protocol.topology import RankPlacement
from ..cluster.spark.capacity import Allotment
from ..cluster.worker import reporting
from ..cluster.worker.main import call, describe_failure
from ..config.launch import LaunchSettings
from ..errors import InvalidInputError
from ..serialize import dump_call, dumps
from ..storage.filesystem import WRITE_FAULTS
from ..typed_json import parse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REPORTS: tuple[type[RankReport], ...] = get_args(RankReport)
_TRANSPORT = "OMPI_MCA_btl"
_running = threading.Event()


@contextlib.contextmanager
def one_rank_here() -> Iterator[None]:
    """Let `HorovodRunner` and `run_training` run their only rank in this process.

    Neither mpirun nor a Spark task is started, so that a debugger and what a test has replaced
    reach the rank. All else is as ever: the function and its arguments are pickled, and the rank
    gets a copy of them; what it raises comes as `RankFailedError`; training, checkpoints, restarts
    and the run directory are the same. `run_training` still needs a Spark session, for the
    DataFrame and the transformer; `HorovodRunner` needs none.

    It holds for calls from this thread, which must be the main one. There is one rank, because a
    process is one rank of MPI's: ``num_workers`` must be 1 or, for `HorovodRunner`, may be left
    out. How ranks are started and watched has no meaning here (``gpus_per_worker``, ``log_dir``,
    all of `LaunchOptions` but ``env``), and the process has loaded the framework afterwards.

    Raises:
        InvalidInputError: more than one rank is asked for, or it is not the main thread. Raised by
            the calls inside.
    """
    with using_launcher(_OneRank()):
        yield


def runs_here() -> bool:
    """Tell whether the code that calls this is that of a rank of `one_rank_here`."""
    return _running.is_set()


@dataclass(frozen=True)
class _Reports:
    """Takes what the rank reports, as its slot would."""

    observer: Observer
    host: str

    def sendall(self, data: bytes, /) -> None:
        self.observer.on_message(Envelope(0, 0, self.host, parse(data, *_REPORTS)))


class _OneRank:
    """A `Launcher` that calls the function itself."""

    def warm_up(
        self,
        spark: SparkSession,
        options: LaunchSettings,
        allotment: Allotment,
        modules: Sequence[str],
    ) -> None:
        """Nothing to import ahead: the function runs in this process."""

    def await_slots(self, spark: SparkSession, options: LaunchSettings, workers: int) -> None:
        """No executor is needed."""

    def launch(
        self,
        spark: SparkSession | None,
        options: LaunchSettings,
        function: Callable[..., Any],
        args: Sequence[object],
        kwargs: dict[str, object],
        observer: Observer,
        modules: Sequence[str] | None = None,
        workers: int | None = None,
    ) -> RunResult:
        if (workers or 1) != 1:
            raise InvalidInputError(
                f"num_workers={workers}, but inside one_rank_here one rank runs in this process; "
                "give num_workers=1, or let Spark start the ranks"
            )
        if threading.current_thread() is not threading.main_thread():
            raise InvalidInputError(
                f"one_rank_here runs the rank in the main thread, which handles signals; this is "
                f"{threading.current_thread().name!r}"
            )
        if _running.is_set():
            raise InvalidInputError("a rank of one_rank_here cannot start another run")
        payload, _ = dump_call(function, args, kwargs)
        began = time.monotonic()
        placement = RankPlacement(rank=0, slot=0, host=platform.node(), local_rank=0, cross_rank=0)
        try:
            observer.on_message(from_driver(Notice("one rank runs in this process", warn=False)))
            with _as_rank(_Reports(observer, placement.host), options.env):
                result = _call(payload, placement, is_program=modules is None)
            observer.poll()
        finally:
            observer.close()
        seconds = time.monotonic() - began
        return RunResult((result,), (placement,), {"function": seconds, "total": seconds})


@contextlib.contextmanager
def _as_rank(reports: _Reports, environment: Mapping[str, str]) -> Iterator[None]:
    """Let this process be the rank: with its reports, environment and temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        # Open MPI leaves its files behind: a folder in the temporary one, and shared memory, of
        # which a world of one has no need.
        transport = os.environ.get(_TRANSPORT, "self")
        environment = {"TMPDIR": temporary, _TRANSPORT: transport, **environment}
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        reporting.connect(reports)
        _running.set()
        try:
            yield
        finally:
            _running.clear()
            WRITE_FAULTS.end()
            reporting.connect(None)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _call(payload: bytes, placement: RankPlacement, *, is_program: bool) -> object:
    """Call the function as a rank does; its result is a copy, too."""
    function, args, kwargs = pickle.loads(payload)
    reporting.send(Started())
    try:
        return pickle.loads(dumps(call(function, args, kwargs, is_program=is_program)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, but for a program's exit with code 0
        outcome = RankOutcome(0, placement.host, placement, failure=describe_failure(error))
        raise failure_error(outcome, [outcome], error) from error
