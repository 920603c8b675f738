"""Trains with faults on the master given, in a process of its own that may be killed.

Usage: python -m tests.faults.job MASTER RUN_DIR FOLDER OPTIONS [FAULT ...]

OPTIONS are further arguments of ``training.train``, as JSON, and ``calls``: how often it is called
if it fails (1). A FAULT is what its ``text`` says. Prints the attempts of the last call.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from pyspark.sql import SparkSession

from horovod_spark_runner.errors import HorovodSparkError

from .injection import Fault
from .phases import PhaseFault
from .training import make_frame, train


def main() -> None:
    master, run_dir, folder, options, *texts = sys.argv[1:]
    faults: list[Fault | PhaseFault] = []
    for text in texts:
        place, *victims = text.split(":")
        pairs = [(int(rank), kind) for rank, kind in zip(victims[::2], victims[1::2], strict=True)]
        if place.isdigit():
            faults += [Fault(int(place), rank, kind) for rank, kind in pairs]
        else:
            faults.append(PhaseFault(place, tuple(pairs)))
    spark = (
        SparkSession.builder.master(master)
        .appName("faults")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"))
        .config("spark.ui.showConsoleProgress", "false")
        # So that Python has some rows before it has all.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        # How long an executor may be silent; the others must be well below that.
        .config("spark.network.timeout", "30s")
        .config("spark.network.timeoutInterval", "10s")
        .config("spark.executor.heartbeatInterval", "5s")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    given = json.loads(options)
    calls = given.pop("calls", 1)
    while True:
        try:
            result = train(make_frame(spark), Path(run_dir), faults, folder, **given)
            break
        except HorovodSparkError:
            calls -= 1
            if not calls:
                raise
            traceback.print_exc()
    spark.stop()
    print(json.dumps([asdict(attempt) for attempt in result.summary.attempts]))


if __name__ == "__main__":
    main()
