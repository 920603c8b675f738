"""Settings of how ranks are started and watched."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

from ..errors import InvalidInputError
from .fields import Settings, from_table, setting
from .validators import (
    ENVIRONMENT,
    FLAG,
    PLACE,
    SECONDS,
    TEXT,
    TEXT_MAP,
    Kind,
    as_integer,
    check_number,
    choice,
    count,
    number_above_zero,
    optional,
    options_of,
)

AllreduceAlgorithm = Literal["auto", "ring", "segmented_ring", "recursive_doubling"]
# Slots show themselves every 5 seconds; less than three times that ends healthy runs.
_MIN_HEARTBEAT_TIMEOUT = 15.0


def _check_resources(name: str, value: Any) -> object:
    if not isinstance(value, Mapping):
        return value
    for resource, amount in value.items():
        is_number = isinstance(amount, Real) and not isinstance(amount, bool)
        if not isinstance(resource, str) or not is_number or amount <= 0:
            raise InvalidInputError(
                f"{name} must map names to amounts above 0, such as {{'cpus': 4, 'gpu': 1}}, got "
                f"{dict(value)!r}"
            )
    return {
        resource: float(amount) if as_integer(amount) is None else int(amount)
        for resource, amount in value.items()
    }


def _check_heartbeat(name: str, value: object) -> float:
    seconds = check_number(name, value, unit="seconds")
    if seconds < _MIN_HEARTBEAT_TIMEOUT:
        raise InvalidInputError(
            f"{name} must be at least {_MIN_HEARTBEAT_TIMEOUT:g} seconds, got {value!r}"
        )
    return seconds


# Other programs' 0 and -1: all slots, and the driver's machine.
_ALL_SLOTS = (
    "; leave it out for as many ranks as Spark can run at once; SparkSession.builder.master("
    "'local[2]') runs them on this machine"
)
_HEARTBEAT: Kind[float] = Kind(
    f"number of seconds, at least {_MIN_HEARTBEAT_TIMEOUT:g}", _check_heartbeat, "toFloat", float
)
_RESOURCES: Kind[object] = Kind(
    "amounts above 0 by name, or a Spark `ResourceProfile`; or `None`", _check_resources
)


@from_table
@dataclass(frozen=True, kw_only=True)
class MpiOptions(Settings):
    """Options of Open MPI and Horovod, which move data between ranks."""

    algorithm: AllreduceAlgorithm = setting(
        "auto",
        choice(*get_args(AllreduceAlgorithm)),
        'Open MPI\'s allreduce. ``"auto"`` (default): its own choice within a host and between '
        "two; between more, recursive doubling for small messages and a ring for large ones, "
        "after the ranks of each host have added up. A ring moves the least data (2·(N−1)/N of "
        "the message per host or rank) but needs 2·(N−1) sequential messages. "
        '``"ring"`` and the others force one over all ranks and for every size.',
    )
    segment_bytes: int = setting(
        0,
        count(0),
        'segment size of ``"segmented_ring"``, in bytes; 0 (default) keeps Open MPI\'s.',
    )
    fusion_bytes: int = setting(
        64 * 1024 * 1024, count(0), "Horovod's fusion buffer, in bytes (64 MiB)."
    )
    cycle_ms: float = setting(
        0.5,
        number_above_zero("milliseconds"),
        "how long Horovod waits for further tensors, in milliseconds (0.5).",
    )
    network_interface: str | None = setting(
        None,
        optional(TEXT),
        "network interface of the ranks: its name, its address, or a network such as "
        "``10.0.0.0/8``; by default, that of the route to the other hosts.",
    )
    parameters: Mapping[str, str] = setting(
        {}, TEXT_MAP, "further Open MPI parameters by name, as ``mpirun --mca NAME VALUE``."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segment_bytes and self.algorithm != "segmented_ring":
            raise InvalidInputError(
                f"segment_bytes={self.segment_bytes} applies to algorithm='segmented_ring' only, "
                f"got algorithm={self.algorithm!r}"
            )


@from_table
@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Settings):
    """Options of starting and monitoring the ranks."""

    resources: Any = setting(
        None,
        _RESOURCES,
        "resources of a rank's Spark task, in place of the session's settings: amounts by "
        'name (``{"cpus": 4, "gpu": 1}``) or a Spark ``ResourceProfile``.',
    )
    share_gpus: bool = setting(
        False, FLAG, "allow several ranks on one device, which sum without NCCL (false)."
    )
    start_timeout: float | None = setting(
        None,
        optional(SECONDS),
        "seconds to wait for executors to register: those of a new session (10 by default), and "
        "before a restart those that replace lost ones (30). If slots exist but are busy, Spark "
        "has as long to start the tasks, and 60 seconds at least.",
    )
    stall_timeout: float | None = setting(
        None,
        optional(SECONDS),
        "seconds without progress of any rank after which the run is ended, with the Python stacks "
        "of all ranks in the error; never by default. Progress is a step of a training, or a call "
        "of `report_progress` in a function; printing is not.",
    )
    heartbeat_timeout: float = setting(
        30.0, _HEARTBEAT, "seconds of silence after which a host counts as lost (30)."
    )
    worker_idle_timeout: float = setting(
        60.0,
        SECONDS,
        "seconds for which a process with the imported framework stays on each executor, so that "
        "the next run's ranks start faster (60); 0 keeps none.",
    )
    allow_unencrypted: bool = setting(
        False,
        FLAG,
        "run across hosts although Spark encrypts its own traffic: MPI's is not encrypted (false).",
    )
    env: Mapping[str, str] = setting(
        {},
        ENVIRONMENT,
        "environment variables to set on every rank. Others are its executor's, not the driver's, "
        "and so is its working directory: use absolute paths.",
        shown=False,
    )
    mpi: MpiOptions = setting(
        MpiOptions(), options_of(MpiOptions), "see `MpiOptions`: MPI, Horovod and the network."
    )

    # Immutable, so a copy in this process is not needed.
    def __copy__(self) -> LaunchOptions:
        return self

    def __deepcopy__(self, memo: Any) -> LaunchOptions:
        return self

    def __reduce__(self) -> tuple[Callable[[], Settings], tuple[()]]:
        # On the workers the resources, perhaps a handle on Spark's JVM, are useless.
        return Settings.__reduce__(replace(self, resources=None) if self.resources else self)


@from_table
@dataclass(frozen=True)
class LaunchSettings(LaunchOptions):
    """Settings of launching a function on ranks: their number, options and output."""

    num_workers: int | None = setting(
        None,
        optional(count(advice=_ALL_SLOTS)),
        "ranks, one per Spark task; by default as many as Spark can run at once, which is printed.",
    )
    _: KW_ONLY
    gpus_per_worker: int = setting(
        0, count(0), "GPUs of each rank as Spark schedules them; 0 (default) for CPU."
    )
    stream_logs: bool = setting(
        True,
        FLAG,
        "show progress, placement and output of the ranks on the driver (default); otherwise only "
        "warnings.",
    )
    log_dir: str | os.PathLike[str] | None = setting(
        None, optional(PLACE), "folder or URL for the full log of each rank; none by default."
    )
