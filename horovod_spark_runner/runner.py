"""`HorovodRunner`: any function, on every rank of a Horovod world inside Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .config import AllreduceOptions, LaunchOptions
from .launch.console import Console
from .launch.driver import RunResult, launch
from .session import active_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class HorovodRunner:
    """Runs a function on ``num_workers`` MPI ranks, one per Spark barrier task.

    The function is an ordinary Horovod program: it calls ``hvd.init()`` and goes on from there.

    Args:
        num_workers: ranks.
        gpus_per_worker: GPUs of each rank as Spark schedules them; 0 (default) for CPU.
        spark: session to run in; the active one by default.
        start_timeout: seconds to wait for Spark's executors to offer enough slots (10).
        env: environment variables to set on every rank.
        allreduce: see `AllreduceOptions`.
        mpi_parameters: further Open MPI parameters by name (``mpirun --mca NAME VALUE``).
        stream_logs: print the ranks' output on the driver, prefixed with ``[rank/host]``.

    Raises:
        InvalidInputError: a setting cannot be right.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        gpus_per_worker: int = 0,
        spark: SparkSession | None = None,
        start_timeout: float = 10.0,
        env: Mapping[str, str] | None = None,
        allreduce: AllreduceOptions | None = None,
        mpi_parameters: Mapping[str, str] | None = None,
        stream_logs: bool = True,
    ) -> None:
        self._options = LaunchOptions(
            num_workers=num_workers,
            gpus_per_worker=gpus_per_worker,
            start_timeout=start_timeout,
            env=env or {},
            mpi_parameters=mpi_parameters or {},
            allreduce=allreduce or AllreduceOptions(),
            stream_logs=stream_logs,
        )
        self._spark = spark

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RunResult:
        """Call ``function(*args, **kwargs)`` on every rank and return what they returned.

        Raises:
            InvalidInputError: the function or an argument cannot be sent to the workers.
            NotEnoughSlotsError: Spark cannot run that many tasks at once.
            RankFailedError: a rank raised, exited or was killed; names the first, with traceback.
            LaunchError: the ranks could not be started, or Spark lost them.
        """
        spark = self._spark or active_session()
        console = Console(show_logs=self._options.stream_logs)
        return launch(spark, self._options, function, args, kwargs, console)
