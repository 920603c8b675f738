"""Paths that Spark's Java cannot name in its locale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.spark]

TRAINS = """
import sys
from pyspark.sql import SparkSession
from horovod_spark_runner import run_training
from tests.trainings import digits_model

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.createDataFrame([([0.0] * 64, 1)] * 8, "image array<float>, digit int")
run_training(frame, digits_model, feature_cols=["image"], label_cols=["digit"], num_workers=1,
    batch_size=4, epochs=1, run_dir=sys.argv[1])
"""


def test_a_run_directory_that_java_cannot_name_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "größe"
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", TRAINS, str(run_dir)],
        env={**os.environ, "LC_ALL": "C"},
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    lines = done.stderr.splitlines()
    error = next(line for line in lines if ".EnvironmentProblem: " in line)
    assert str(run_dir) in error
    assert "LC_ALL" in error
    assert list(tmp_path.rglob("*.parquet")) == []
