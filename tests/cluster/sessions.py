"""The Spark session of the jobs that the cluster tests start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import SparkSession


def is_connect(master: str) -> bool:
    return master.startswith("connect:")


def make_session(master: str, settings: Iterable[str], log_level: str) -> Any:
    """Return a session on ``master``, a Spark master or ``connect:`` and a Spark Connect remote.

    A remote of ``local[N]`` starts a Spark Connect server and talks to it.
    """
    builder = SparkSession.builder.appName("cluster test")
    if is_connect(master):
        builder = builder.remote(master.partition(":")[2])
    else:
        builder = builder.master(master)
    for setting in ["spark.ui.enabled=false", "spark.ui.showConsoleProgress=false", *settings]:
        key, _, value = setting.partition("=")
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if not is_connect(master):
        spark.sparkContext.setLogLevel(log_level)
    return spark
