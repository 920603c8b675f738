"""Python tasks of a Spark job that computes on none of Spark's data."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import errors
from ...errors import EnvironmentProblem
from .session import classic_context, described, use_driver_python

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_Body = Callable[[], Iterable[bytes]]
# GPUs with which a framework of this process was, or will be, imported: it uses only these.
_devices: frozenset[str] | None = None


@dataclass(frozen=True)
class _OfPartition:
    """The function given to ``mapPartitions``."""

    body: _Body

    def __call__(self, rows: Iterable[object]) -> Iterator[bytes]:
        for _ in rows:  # Spark counts a task's rows to their end
            pass
        yield from self.body()


@dataclass(frozen=True)
class _OfBatches:
    """The function given to ``mapInArrow``."""

    body: _Body

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            pass
        for data in self.body():
            # ``pa.array`` would import pandas, a third of a second.
            ends = len(data).to_bytes(8, "little")  # 0 and the length, as two 32-bit numbers
            buffers = [None, pa.py_buffer(bytes(4) + ends[:4]), pa.py_buffer(data)]
            column = pa.Array.from_buffers(pa.binary(), 1, buffers)
            yield pa.RecordBatch.from_arrays([column], names=["data"])


def collect_from_tasks(
    spark: SparkSession, tasks: int, body: _Body, *, barrier: bool = False, profile: object = None
) -> list[bytes]:
    """Run ``body`` in ``tasks`` Python tasks and return all that they yield, in task order.

    On classic Spark the job is not a query: planning and compiling the first query of a session
    takes seconds.

    Args:
        spark: session to run in.
        tasks: how many.
        body: pickled and called in each task; what it yields has less than 2 GiB a piece.
        barrier: whether all of them start at once, or none.
        profile: Spark's ``ResourceProfile`` of the stage, if not the session's own settings.
    """
    use_driver_python(spark)
    context = classic_context(spark)
    if context is None:
        options = {} if profile is None else {"profile": profile}
        frame = spark.range(0, tasks, 1, tasks)
        pieces_frame = frame.mapInArrow(_OfBatches(body), "data binary", barrier=barrier, **options)
        return [bytes(row.data) for row in pieces_frame.collect()]
    numbers = context.parallelize(range(tasks), tasks)
    rdd = (numbers.barrier() if barrier else numbers).mapPartitions(_OfPartition(body))
    pieces: list[bytes] = (rdd if profile is None else rdd.withResources(profile)).collect()
    return pieces


def raise_task_error(error: Exception) -> None:
    """Raise the error of this package that ended a Spark task; do nothing if there is none.

    Args:
        error: the error of Spark, which quotes the worker's.
    """
    matches = re.findall(r"^horovod_spark_runner\.errors\.(\w+): (.*)$", str(error), re.MULTILINE)
    for name, text in matches[-1:]:
        raise getattr(errors, name, errors.ModelError)(text) from error


@dataclass(frozen=True)
class _Question:
    """The function given to ``mapInArrow``."""

    ask: Callable[[], str]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            apply_task_limits()
            yield pa.RecordBatch.from_pydict({"text": [self.ask()]})


def query_worker(spark: SparkSession, ask: Callable[[], str], *, keep: bool = False) -> str:
    """Return the value of ``ask`` in one of Spark's Python workers, which may load a framework.

    Args:
        spark: session to run in.
        ask: pickled and sent to the worker.
        keep: whether the worker stays for the tasks that follow, with what it has loaded. Where
            executors have several GPUs it ends even so: it would keep to its own.
    """
    use_driver_python(spark)
    answers = spark.range(0, 1, 1, 1).mapInArrow(_Question(ask), "text string")
    gpus = float(spark.conf.get("spark.executor.resource.gpu.amount", "0") or 0)
    with described(spark, "Horovod: asking a Python worker of a model"):
        # Spark ends a worker whose output it does not read to the end, as ``first`` does.
        row = answers.collect()[0] if keep and gpus <= 1 else answers.first()
    assert row is not None  # the query runs once, for the only row
    return str(row.text)


def apply_task_limits() -> None:
    """Limit a framework to this task's cores and devices; at the beginning of each task.

    Raises:
        EnvironmentProblem: an earlier task of this process had other GPUs, and a framework keeps to
            the first ones.
    """
    global _devices
    from pyspark import TaskContext

    context = TaskContext.get()
    cpus = str(context.cpus() if context is not None else 1)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(name, cpus)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Workers may share a GPU, whose memory the first one would take whole.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    gpus = context.resources().get("gpu") if context is not None else None
    addresses = gpus.addresses if gpus is not None else []
    if _devices is None:
        _devices = frozenset(addresses)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(addresses)
    elif _devices != frozenset(addresses):
        raise EnvironmentProblem(
            f"this task has {_format_gpus(addresses)}, and this Python worker of Spark's has "
            f"computed on {_format_gpus(_devices)} for an earlier one, to which TensorFlow keeps: "
            "give each executor one GPU (spark.executor.resource.gpu.amount=1), or set "
            "spark.python.worker.reuse=false"
        )


def _format_gpus(addresses: Collection[str]) -> str:
    return f"GPU {', '.join(sorted(addresses))}" if addresses else "no GPU"


def exclude_from_gc(*, dropped: bool) -> None:
    """Exclude all live objects, such as a framework and a model, from garbage collections.

    Spark's worker collects garbage after every task, which visits every object: with TensorFlow
    loaded that takes longer than many tasks. Visiting the excluded objects again, to find those
    that are garbage by now, takes as long, and copies the parent's frozen pages in a forked
    process.

    Args:
        dropped: whether objects that an earlier call excluded have become garbage.
    """
    if dropped:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
