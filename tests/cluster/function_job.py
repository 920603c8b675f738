"""Runs small Horovod functions on the master given; prints what became of them, as a JSON list.

Usage: function_job.py MASTER REQUEST ... [KEY=VALUE ...]

MASTER is a Spark master, or ``connect:`` and a Spark Connect remote.
A REQUEST is a JSON object: ``what``, the function, and arguments of HorovodRunner, or
``"counted"`` and arguments of it. A function that
ends in ``_by_spark`` lets the slots find each other through Spark, not the driver. A KEY is a
setting of Spark. The list is printed after every function, and the last is that of all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from added_up import accumulates  # noqa: F401 - found by its name
from counted import counted
from sessions import make_session

from horovod_spark_runner import HorovodRunner
from horovod_spark_runner.cluster.protocol import rendezvous


def where() -> dict[str, Any]:
    """Return where this rank is, after an allreduce that proves the world."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    total = hvd.allreduce(tf.constant([float(hvd.rank())] * 100_000), op=hvd.Sum)
    return {
        "rank": hvd.rank(),
        "local_rank": hvd.local_rank(),
        "cross_rank": hvd.cross_rank(),
        "size": hvd.size(),
        "sum": float(total[-1]),
        "host": socket.gethostname(),
        "interface": os.environ.get("NCCL_SOCKET_IFNAME"),
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
    }


def forever() -> None:
    """Take part in allreduces until something ends it."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    print("in the loop", flush=True)
    while True:
        hvd.allreduce(tf.constant(1.0), name="x")
        time.sleep(0.05)


def light() -> dict[str, Any]:
    """Return where this rank is, without a framework."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    numbers = np.full(2 << 20, world.rank, np.float32)
    totals = np.empty_like(numbers)
    world.Barrier()
    before = _received()
    world.Allreduce(numbers, totals)
    world.Barrier()
    return {
        "rank": world.rank,
        "size": world.size,
        "sum": int(totals.min()),
        "received": (_received() - before) / numbers.nbytes,
        "host": socket.gethostname(),
    }


def _received() -> int:
    """Return the bytes that have come to this host by its cable."""
    return int(Path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


def light_failure() -> None:
    """Fail on one rank while the others wait for it."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    if world.rank == 17:
        raise ValueError(f"at {time.time()}")
    world.Barrier()


def answer_to(what: str, **arguments: Any) -> dict[str, Any]:
    """Return what became of a function."""
    began = time.time()
    try:
        given = {"each": arguments.pop("each")} if "each" in arguments else {}
        run = HorovodRunner(**arguments).run(globals()[what], **given)
        answer: dict[str, Any] = {"results": run.results, "timings": run.timings}
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    return {**answer, "ended": time.time(), "took": time.time() - began}


def arrange_nothing(self: rendezvous.Rendezvous) -> None:
    """Leave it to Spark."""


def through_spark(what: str, **arguments: Any) -> dict[str, Any]:
    """Return what became of a function whose slots do not learn their ranks from the driver."""
    with (
        mock.patch.object(rendezvous, "GATHER_AFTER", 1.0),
        mock.patch.object(rendezvous.Rendezvous, "_arrange", arrange_nothing),
    ):
        return answer_to(what, **arguments)


def answer(text: str, spark: Any) -> dict[str, Any]:
    """Return what became of a request."""
    request = json.loads(text)
    what = request.pop("what")
    if what == "counted":
        told: dict[str, Any] = counted(spark, **request)
        return told
    ask = through_spark if what.endswith("_by_spark") else answer_to
    return ask(what.removesuffix("_by_spark"), **request)


def main() -> None:
    master, *given = sys.argv[1:]
    spark = make_session(master, [text for text in given if not text.startswith("{")], "OFF")
    answers = []
    for text in given:
        if text.startswith("{"):
            answers.append(answer(text, spark))
            print(json.dumps(answers), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
