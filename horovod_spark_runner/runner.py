"""`HorovodRunner`: any function, on every rank of a Horovod world inside Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .config import AllreduceOptions, LaunchOptions
from .errors import InvalidInputError
from .launch.driver.console import Console
from .launch.driver.launch import RunResult, launch
from .spark.session import active_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class HorovodRunner:
    """Runs a function on ``num_workers`` MPI ranks, one per Spark barrier task.

    The function is an ordinary Horovod program: it calls ``hvd.init()`` and goes on from there.

    Args:
        num_workers: ranks.
        gpus_per_worker: GPUs of each rank as Spark schedules them; 0 (default) for CPU.
        spark: session to run in; the active one by default.
        resources: what each task of the training asks of Spark in place of the session's
            settings: amounts by name, such as ``{"cpus": 4, "gpu": 1}``, or a ``ResourceProfile``.
        share_gpus: allow several ranks on one device.
        start_timeout: seconds to wait for free slots; by default no longer than the executors of
            a new session take to register (10), or Spark to start the tasks (60).
        stall_timeout: seconds without progress of any rank after which the run ends with the
            Python stacks of all ranks in the error; never by default. The function tells of its
            progress with `report_progress`; what it prints does not count.
        heartbeat_timeout: seconds of silence after which a host counts as lost (30).
        worker_idle_timeout: seconds for which a process that has imported the framework stays on
            each executor for the next run (60); 0 keeps none.
        network_interface: interface the ranks talk over: a name, an address or a network such as
            ``10.0.0.0/8``; by default that of the route to the other hosts.
        allow_unencrypted: run across hosts although Spark is set to encrypt its own traffic:
            MPI's is not encrypted.
        env: environment variables to set on every rank. Otherwise it has its executor's, not the
            driver's, and the executor's working directory: name files by whole paths.
        allreduce: see `AllreduceOptions`.
        mpi_parameters: further Open MPI parameters by name (``mpirun --mca NAME VALUE``).
        stream_logs: print on the driver where the ranks run and their output, prefixed with
            ``[rank/host]``; without, nothing is shown but warnings.
        log_dir: folder or URL for the full log of each rank; none by default.

    Raises:
        InvalidInputError: a setting cannot be right.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        gpus_per_worker: int = 0,
        spark: SparkSession | None = None,
        resources: Any = None,
        share_gpus: bool = False,
        start_timeout: float | None = None,
        stall_timeout: float | None = None,
        heartbeat_timeout: float = 30.0,
        worker_idle_timeout: float = 60.0,
        network_interface: str | None = None,
        allow_unencrypted: bool = False,
        env: Mapping[str, str] | None = None,
        allreduce: AllreduceOptions | None = None,
        mpi_parameters: Mapping[str, str] | None = None,
        stream_logs: bool = True,
        log_dir: str | None = None,
    ) -> None:
        if allreduce is not None and allreduce.compression != "none":
            raise InvalidInputError(
                f"compression={allreduce.compression!r} is for the gradients of run_training; in a "
                "function of your own, give compression=hvd.Compression.fp16 to Horovod"
            )
        self._options = LaunchOptions(
            num_workers=num_workers,
            gpus_per_worker=gpus_per_worker,
            resources=resources,
            share_gpus=share_gpus,
            start_timeout=start_timeout,
            stall_timeout=stall_timeout,
            heartbeat_timeout=heartbeat_timeout,
            worker_idle_timeout=worker_idle_timeout,
            network_interface=network_interface,
            allow_unencrypted=allow_unencrypted,
            env=env or {},
            mpi_parameters=mpi_parameters or {},
            allreduce=allreduce or AllreduceOptions(),
            stream_logs=stream_logs,
            log_dir=log_dir,
        )
        self._spark = spark

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RunResult:
        """Call ``function(*args, **kwargs)`` on every rank and return what they returned.

        A rank's process ends once its function has returned: threads that still run then do not
        come to their end, and what was registered with ``atexit`` is not called. Join threads and
        close what must be written before you return.

        Args:
            function: pickled and sent to every rank.
            args: its positional arguments, sent along.
            kwargs: its keyword arguments, sent along.

        Raises:
            InvalidInputError: the function or an argument cannot be sent to the workers.
            EnvironmentProblem: something is not installed or set up as it must be.
            NotEnoughSlotsError: Spark cannot run that many tasks at once.
            RankFailedError: a rank raised, exited, was killed or lost; names the first, with
                its traceback.
            StalledError: no rank made progress for ``stall_timeout``.
            RunCancelledError: the Spark job was cancelled.
            LaunchError: the ranks could not be started, or Spark lost them.
        """
        spark = self._spark or active_session()
        console = Console(quiet=not self._options.stream_logs)
        return launch(spark, self._options, function, args, kwargs, console)
