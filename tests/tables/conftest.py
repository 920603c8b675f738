"""The session of the cases, which `test_tables` starts."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import trainings
from tests.numpy_engine import Line

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.python.daemon.module": "tests.python_daemon",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.ice.type": "hadoop",
}

train = functools.partial(
    trainings.train,
    model_fn=Line(noise=0.0),
    feature_cols=["x"],
    label_cols=["y"],
    batch_size=8,
    epochs=1,
)


@pytest.fixture(scope="session")
def lake(marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with Delta Lake, and with Iceberg as the catalog ``ice``."""
    from pyspark.sql import SparkSession

    jars = Path(os.environ["TABLES_JARS"]).glob("*.jar")
    folder = tmp_path_factory.mktemp("warehouse")
    builder = SparkSession.builder.master("local[4]").config("spark.jars", ",".join(map(str, jars)))
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "spark"))
    builder = builder.config("spark.sql.catalog.ice.warehouse", str(folder / "ice"))
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def points(lake: Any) -> Any:
    """160 rows: ``id``, ``x`` (array of 2), ``y`` (linear in ``x``), ``half`` (0 or 1)."""
    return lake.range(160).selectExpr(
        "cast(id as int) as id",
        "array(float(id % 7 / 7), float(id % 11 / 11)) as x",
        "float((id % 7 - 2 * (id % 11)) / 10) as y",
        "cast(id % 2 as int) as half",
    )
