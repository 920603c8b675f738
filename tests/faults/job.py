"""Trains with faults on the master given, in a process of its own that may be killed.

Usage: python -m tests.faults.job MASTER RUN_DIR FOLDER OPTIONS [STEP:RANK:KIND ...]

OPTIONS are further arguments of ``training.train``, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from pyspark.sql import SparkSession

from .injection import Fault
from .training import make_frame, train


def main() -> None:
    master, run_dir, folder, options, *texts = sys.argv[1:]
    faults = []
    for text in texts:
        step, rank, kind = text.split(":")
        faults.append(Fault(int(step), int(rank), kind))
    spark = (
        SparkSession.builder.master(master)
        .appName("faults")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"))
        .config("spark.ui.showConsoleProgress", "false")
        # How long an executor may be silent; the others must be well below that.
        .config("spark.network.timeout", "30s")
        .config("spark.network.timeoutInterval", "10s")
        .config("spark.executor.heartbeatInterval", "5s")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    result = train(make_frame(spark), Path(run_dir), faults, folder, **json.loads(options))
    spark.stop()
    print(json.dumps([asdict(attempt) for attempt in result.attempts]))


if __name__ == "__main__":
    main()
