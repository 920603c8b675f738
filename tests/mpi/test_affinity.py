"""Ranks of a real run keep to their share of the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

# A host of two cores, whatever the machine has: all that Spark starts inherits them.
SESSION = """
import contextlib, json, os, sys
os.sched_setaffinity(0, map(int, sys.argv[1:]))
from pyspark.sql import SparkSession
from horovod_spark_runner import HorovodRunner

def cores():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()  # starts threads, as what follows does
    hvd.allreduce(tf.random.normal((500, 500)) @ tf.random.normal((500, 500)))
    threads = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            threads.append(os.sched_getaffinity(int(thread)))
    return len(threads), sorted(set().union(*threads))

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
# The second run's ranks come from the process that the first run's ranks came from.
runs = [HorovodRunner(ranks, stream_logs=False).run(cores).results for ranks in (2, 1)]
spark.stop()
print(json.dumps(runs))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_ranks_are_bound_where_they_take_up_all_cores() -> None:
    host = sorted(os.sched_getaffinity(0))[:2]
    done = subprocess.run(
        [sys.executable, "-c", SESSION, *map(str, host)],
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two, one = json.loads(done.stdout.splitlines()[-1])
    assert all(threads > 2 for threads, _ in two + one)
    assert sorted(cores for _, cores in two) == [host[:1], host[1:]]
    assert [cores for _, cores in one] == [host]
