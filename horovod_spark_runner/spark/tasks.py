"""Python tasks of a job of our own, which computes on none of Spark's data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import errors
from .session import classic_context, use_own_python

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

Body = Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class _OfPartition:
    """The function given to ``mapPartitions``."""

    body: Body

    def __call__(self, rows: Iterable[object]) -> Iterator[bytes]:
        for _ in rows:  # Spark counts a task's rows to their end
            pass
        yield from self.body()


@dataclass(frozen=True)
class _OfBatches:
    """The function given to ``mapInArrow``."""

    body: Body

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
    spark: SparkSession, tasks: int, body: Body, *, barrier: bool = False, profile: Any = None
) -> list[bytes]:
    """Run ``body`` in ``tasks`` Python tasks and return all that they yield, in their order.

    On classic Spark the job is no query: planning and compiling the first query of a session takes
    seconds.

    Args:
        spark: session to run in.
        tasks: how many.
        body: pickled and called in each task; what it yields has less than 2 GiB a piece.
        barrier: whether all of them start at once, or none.
        profile: Spark's ``ResourceProfile`` of the stage, if not the session's own settings.
    """
    use_own_python(spark)
    context = classic_context(spark)
    if context is None:
        options = {} if profile is None else {"profile": profile}
        frame = spark.range(0, tasks, 1, tasks)
        found = frame.mapInArrow(_OfBatches(body), "data binary", barrier=barrier, **options)
        return [bytes(row.data) for row in found.collect()]
    numbers = context.parallelize(range(tasks), tasks)
    made = (numbers.barrier() if barrier else numbers).mapPartitions(_OfPartition(body))
    pieces: list[bytes] = (made if profile is None else made.withResources(profile)).collect()
    return pieces


def raise_task_error(error: Exception) -> None:
    """Raise the error of this package that ended a Spark task; do nothing if there is none.

    Args:
        error: the error of Spark, which quotes the worker's.
    """
    found = re.findall(r"^horovod_spark_runner\.errors\.(\w+): (.*)$", str(error), re.MULTILINE)
    for name, text in found[-1:]:
        raise getattr(errors, name, errors.ModelError)(text) from error
