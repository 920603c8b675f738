"""Runs a small Horovod function on the master given; prints what became of it as JSON.

Usage: function_job.py MASTER WHAT WORKERS [KEY=VALUE ...]

MASTER is a Spark master, or ``connect:`` and a Spark Connect remote.
A KEY that begins with ``runner.`` is an argument of HorovodRunner, any other a setting of Spark. A
WHAT that ends in ``_by_spark`` lets the slots find each other through Spark, not the driver.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from sessions import make_session

from horovod_spark_runner import HorovodRunner
from horovod_spark_runner.launch.shared import rendezvous


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
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return {
        "rank": world.rank,
        "size": world.size,
        "sum": world.allreduce(world.rank),
        "host": socket.gethostname(),
    }


def light_failure() -> None:
    """Fail on one rank while the others wait for it."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    if world.rank == 17:
        raise ValueError(f"at {time.time()}")
    world.Barrier()


def main() -> None:
    master, what, workers, *settings = sys.argv[1:]
    ours = [setting for setting in settings if setting.startswith("runner.")]
    given = (setting.removeprefix("runner.").partition("=") for setting in ours)
    arguments: dict[str, Any] = {key: json.loads(value) for key, _, value in given}
    spark = make_session(master, [s for s in settings if s not in ours], "OFF")
    began = time.time()
    if what.endswith("_by_spark"):
        rendezvous.GATHER_AFTER = 1.0
        rendezvous.Rendezvous._arrange = lambda self: None  # type: ignore[method-assign]
    try:
        run = HorovodRunner(int(workers), **arguments).run(
            globals()[what.removesuffix("_by_spark")]
        )
        answer: dict[str, Any] = {"results": run.results, "timings": run.timings}
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps({**answer, "ended": time.time(), "took": time.time() - began}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
