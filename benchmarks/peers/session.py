"""The Spark sessions of benchmarks, and how a call is timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any


def make_session(ranks: int, memory: str = "1g") -> Any:
    """Return a session that has run a Python task on every core already."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(f"local[{ranks}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", memory)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    spark.sparkContext.parallelize(range(ranks), ranks).map(str).collect()
    return spark


def join(master: str, address: str) -> Any:
    """Return a session on a cluster, which reaches its driver by this host's address."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", address)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def time_calls(calls: int, call: Callable[[], Any], **more: Any) -> Any:
    """Call ``calls`` times, print the seconds as JSON and return the last result."""
    seconds, timings = [], []
    result = None
    for _ in range(calls):
        began = time.monotonic()
        result = call()
        seconds.append(time.monotonic() - began)
        timings.append(getattr(result, "timings", {}))
    print(json.dumps({"seconds": seconds, "timings": timings}))
    return result
