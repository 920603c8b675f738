"""What transform costs: models loaded once, no row scored or read that is not asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_spark_runner.cluster.spark.tasks import query_worker
from horovod_spark_runner.data.manifest import Column

from ..counting_engine import line, noted, save_line

pytestmark = pytest.mark.spark

ROWS = 40_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    save_line(place, [Column("x", "float32", (2,))], [1.0, 10.0, 0.5])
    return place


@pytest.fixture(scope="module")
def files(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("files") / "parquet")
    frame = spark.range(0, ROWS, 1, 2).selectExpr(
        "id", "array(float(id), 1f) as x", "cast(id as string) as text"
    )
    frame.write.parquet(place)
    return place


@pytest.mark.thorough
def test_a_worker_loads_a_model_once(run: Path, files: str, spark: Any) -> None:
    frame = spark.read.parquet(files)
    for _ in range(3):  # a new transformer of the same model each time
        transformer = line(run)
        for _ in range(2):
            assert transformer.transform(frame).agg({"prediction": "sum"}).first()[0] > 0
    loads = noted(run, "loads")
    assert len(loads) == len(set(loads))


def own_process() -> str:
    return str(os.getpid())


def test_a_worker_that_is_asked_stays_for_what_follows_or_ends(spark: Any) -> None:
    ended = int(query_worker(spark, own_process))
    deadline = time.monotonic() + 30
    while psutil.pid_exists(ended):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kept = int(query_worker(spark, own_process, keep=True))
    time.sleep(0.5)
    assert psutil.pid_exists(kept)


@pytest.mark.thorough
def test_what_a_worker_keeps_costs_later_tasks_nothing(run: Path, files: str, spark: Any) -> None:
    """Spark's workers collect garbage after every task: not among what a model needs."""
    import pyarrow as pa

    frame = spark.read.parquet(files)
    assert line(run).transform(frame).agg({"prediction": "sum"}).first()[0] > 0

    def look(batches: Any) -> Any:
        import gc

        from horovod_spark_runner.model import inference

        for _ in batches:
            counts = [gc.get_freeze_count(), len(gc.get_objects())]
            yield pa.RecordBatch.from_pydict({"counts": [counts] if inference._models else []})

    numbers = spark.range(0, 8, 1, 8).mapInArrow(look, "counts array<long>").collect()
    assert numbers
    for row in numbers:
        left_out, looked_at = row.counts
        assert left_out > 10 * looked_at


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["error", "keep", "skip"])
def test_a_limit_scores_no_more_than_it_needs(
    policy: str, run: Path, files: str, spark: Any
) -> None:
    transformer = line(run, handle_invalid=policy)
    noted(run, "rows")
    assert len(transformer.transform(spark.read.parquet(files)).limit(5).collect()) == 5
    # Which rows are left out shows only when they are scored: a few of Arrow's batches.
    assert sum(noted(run, "rows")) <= (5 if policy != "skip" else ROWS // 2)


@pytest.mark.thorough
def test_what_is_not_asked_for_is_not_read(run: Path, files: str, spark: Any) -> None:
    predicted = line(run).transform(spark.read.parquet(files))
    noted(run, "rows")
    assert len(predicted.filter("id < 10").select("prediction").collect()) == 10
    assert sum(noted(run, "rows")) == 10
    plan = predicted.select("prediction")._jdf.queryExecution().executedPlan().toString()
    assert "ReadSchema: struct<x:array<float>>" in plan
    # Columns of the DataFrame that was given are columns of the one that is returned.
    frame = spark.read.parquet(files)
    both = line(run).transform(frame).select(frame.id, "prediction")
    assert both.filter(frame.id == 7).first().prediction == 17.5


@pytest.mark.thorough
def test_small_arrow_batches_are_joined(run: Path, files: str, spark: Any) -> None:
    key = "spark.sql.execution.arrow.maxRecordsPerBatch"
    frame = spark.read.parquet(files).coalesce(1).selectExpr("id", "array(float(id), 1f) as x")
    noted(run, "rows")
    spark.conf.set(key, "7")
    try:
        rows = line(run, predict_batch_size=1000).transform(frame).limit(ROWS).collect()
    finally:
        spark.conf.unset(key)
    assert {row.id: row.prediction for row in rows} == {i: i + 10.5 for i in range(ROWS)}
    sizes = noted(run, "rows")
    assert set(sizes[:-1]) == {1000}


@pytest.mark.thorough
def test_streams_are_predicted_on(run: Path, files: str, spark: Any) -> None:
    frame = spark.readStream.schema("id long, x array<float>, text string").parquet(files)
    query = (
        line(run, handle_invalid="skip")
        .transform(frame)
        .writeStream.format("memory")
        .queryName("predicted")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    found = spark.sql("select count(*), sum(prediction - id) from predicted").first()
    assert tuple(found) == (ROWS, 10.5 * ROWS)
