"""Starts two ranks and prints where they found what they use; for spark-submit.

``shapes`` (a module) and ``units`` (in a zip file) come with ``--py-files``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import shapes
import units.length
from pyspark.sql import SparkSession

from horovod_spark_runner import HorovodRunner


def look() -> dict[str, Any]:
    """Return what this rank has loaded, after an allreduce of Horovod's."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import horovod_spark_runner

    hvd.init()
    total = hvd.allreduce(tf.constant(shapes.square(hvd.rank() + 1.0)), op=hvd.Sum)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "size": hvd.size(),
        "sum": units.length.in_cm(float(total)),
        "prefix": sys.prefix,
        "executor": os.getcwd(),
        "modules": [m.__file__ for m in (tf, hvd, horovod_spark_runner)],
        "mapped": sorted({line.split(maxsplit=5)[5] for line in maps if "/" in line}),
    }


def main() -> None:
    spark = SparkSession.builder.appName("packed test").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    run = HorovodRunner(2, start_timeout=180).run(look)
    print(json.dumps(run.results), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
