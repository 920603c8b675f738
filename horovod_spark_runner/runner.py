"""`HorovodRunner`: any function, on every rank of a Horovod world inside Spark."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .checkpoint.retry_policy import Attempt
from .cluster.driver.launch import chosen_launcher
from .cluster.driver.result import RunResult
from .config.fields import derive, from_table, setting
from .config.importable import explain_misfit
from .config.launch import LaunchSettings
from .config.training import RestartOptions, check_min_workers
from .config.validators import Kind, options_of
from .errors import InvalidInputError
from .observe.console import Console
from .run.attempts import available_workers, ending_of, numbered, repeat
from .storage.filesystem import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _check_session(name: str, value: object) -> object:
    # One of Spark Connect's is of another class.
    if value is not None and not callable(getattr(value, "createDataFrame", None)):
        raise InvalidInputError(f"{name} must be a SparkSession, got {value!r:.200}")
    return value


_numbers = itertools.count(1)
_SESSION: Kind[object] = Kind("Spark session; or `None`", _check_session)


@from_table
@dataclass(frozen=True, kw_only=True)
class HorovodRunner(LaunchSettings):
    """Runs a function on ``num_workers`` MPI ranks, one per Spark barrier task.

    The function is an ordinary Horovod program: it begins with ``hvd.init()``. Or it is one of
    ``torch.distributed``, as for Spark's ``TorchDistributor``: ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set.
    """

    restarts: RestartOptions = setting(
        RestartOptions(),
        options_of(RestartOptions),
        "see `RestartOptions`: after a rank, executor or host was lost, the function is called "
        "again on every rank, and `attempt` returns 2; it resumes from what it has saved itself.",
    )
    spark: SparkSession | None = setting(
        None, _SESSION, "session to run in; the active one by default.", shown=False
    )

    def run(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> RunResult:
        """Call ``function(*args, **kwargs)`` on every rank and return what they returned.

        A rank's process ends once its function has returned: running threads are ended, and
        ``atexit`` functions are not called. Join threads and close files before you return.
        ``sys.exit()`` and ``sys.exit(0)`` return ``None``, as at the end of a script.

        Args:
            function: pickled and sent to every rank.
            args: its positional arguments, sent along.
            kwargs: its keyword arguments, sent along.

        Raises:
            InvalidInputError: the function does not take these arguments, or it or one of them
                cannot be sent to the workers; or ``min_workers`` is more than there are.
            EnvironmentProblem: something is not installed or set up.
            NotEnoughSlotsError: Spark cannot run that many tasks at once.
            RankFailedError: a rank raised, exited, was killed or lost; names the first, with
                its traceback.
            StalledError: no rank made progress for ``stall_timeout``.
            RunCancelledError: the Spark job was cancelled.
            LaunchError: the ranks could not be started, or Spark lost them.
        """
        if callable(function) and (wrong := explain_misfit(function, *args, **kwargs)):
            hint = "; write run(function, 0.1, epochs=3)" if {"args", "kwargs"} & {*kwargs} else ""
            raise InvalidInputError(
                f"the function cannot be called with the arguments of run: {wrong}{hint}"
            )
        if self.num_workers is not None:
            check_min_workers(self.num_workers, self.restarts)
        # Slots have other working directories, and perhaps homes.
        logs = None if self.log_dir is None else str(Location(self.log_dir))
        # The slots get no session.
        settings = derive(LaunchSettings, self, log_dir=logs)
        launcher, done = chosen_launcher(), list[Attempt]()

        def attempt() -> RunResult:
            began, workers = time.time(), self.num_workers
            try:
                if done and workers is not None:
                    workers = available_workers(
                        launcher, self.spark, settings, workers, self.restarts
                    )
                return launcher.launch(
                    self.spark,
                    numbered(settings, len(done) + 1),
                    function,
                    args,
                    kwargs,
                    Console(f"run {next(_numbers)}", quiet=not self.stream_logs),
                    workers=workers,
                )
            except BaseException as error:
                ending = ending_of(error)
                done.append(Attempt(len(done) + 1, workers or 0, began, time.time(), 0, 0, *ending))
                raise

        return repeat(attempt, done, self.restarts)
