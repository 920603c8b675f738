"""Starts ranks with GPUs and prints what each of them sees; for spark-submit.

Usage: gpu_job.py '{"num_workers": 2, "gpus_per_worker": 1}' ...

Prints, for each set of HorovodRunner's arguments, the ranks' answers or the error as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark.sql import SparkSession

from horovod_spark_runner import HorovodRunner, HorovodSparkError


def devices() -> dict[str, Any]:
    """Return what this rank sees, after it has met the others."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return {
        "rank": world.Get_rank(),
        "met": world.allreduce(1),
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "local_rank": os.environ["LOCAL_RANK"],
        "executor": os.getcwd(),
        "task": os.getppid(),
    }


def main() -> None:
    spark = SparkSession.builder.appName("gpu test").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    answers: list[Any] = []
    for arguments in map(json.loads, sys.argv[1:]):
        # Executors of this machine, busy with other tests, may be slow to register.
        arguments.setdefault("start_timeout", 90)
        try:
            answers.append(list(HorovodRunner(**arguments).run(devices).results))
        except HorovodSparkError as error:
            answers.append(f"{type(error).__name__}: {error}")
    print(json.dumps(answers), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
