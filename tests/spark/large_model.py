"""Run by a test: takes a large model the way to Spark's workers, and tells what memory it took.

Prints JSON: by step, the most memory this process had taken since its frameworks were loaded (and,
where it holds the model itself, the model was built), and what a worker has, in bytes; files that
are mapped do not count, as the system takes their memory back when it needs it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

WIDTH = 128


def taken(pid: int | str = "self") -> int:
    """Return the bytes of memory that a process has taken for itself."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("RssAnon"))
    return 1024 * int(kilobytes)


class Peak:
    """Notes the most memory this process has taken."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self._step, self._before = "", taken()
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, step: str) -> None:
        self.steps[step] = 0
        self._step, self._before = step, taken()

    def _watch(self) -> None:
        while True:
            step = self._step
            if step:
                more = taken() - self._before
                self.steps[step] = max(self.steps[step], more)
            threading.Event().wait(0.005)


def of_worker(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"bytes": pa.array([taken()], pa.int64())})


def workers(spark: SparkSession) -> int:
    """Return what a worker has taken."""
    rows = spark.range(0, 2, 1, 2).mapInArrow(of_worker, "bytes long").collect()
    return int(max(row.bytes for row in rows))


def rows_of(spark: SparkSession, rows: int) -> DataFrame:
    last = rows - 1
    return spark.range(0, 8, 1, 2).selectExpr(
        "id", f"array(cast({last} - id as int), cast(id as int)) as features"
    )


def predicted(transformer: Any, frame: DataFrame) -> list[list[float]]:
    found = transformer.transform(frame).orderBy("id").collect()
    return [np.ravel(row.prediction).tolist() for row in found]


def build(rows: int) -> Any:
    import keras

    shape = (rows, WIDTH)
    layers = [
        keras.Input((2,), dtype="int32"),
        keras.layers.Embedding(*shape, embeddings_initializer="zeros", name="table"),
        keras.layers.GlobalAveragePooling1D(),
    ]
    model = keras.Sequential(layers)
    ends = np.random.default_rng(0).random((2, 16, WIDTH), dtype=np.float32)
    table = np.zeros(shape, np.float32)
    table[:16], table[-16:] = ends
    model.get_layer("table").embeddings.assign(table)
    return model


def adopt(spark: SparkSession, rows: int, place: str) -> dict[str, Any]:
    from horovod_spark_runner import TFTransformer

    model = build(rows)
    frame = rows_of(spark, rows)
    given = np.array([row.features for row in frame.orderBy("id").collect()])
    wanted = np.array(model(given)).tolist()
    peak = Peak()
    peak.begin("from_keras")
    transformer = TFTransformer.from_keras(model)
    peak.begin("transform")
    found = predicted(transformer, frame)
    peak.begin("save")
    transformer.write().overwrite().save(place)
    return {"steps": peak.steps, "wanted": wanted, "found": found}


def load(spark: SparkSession, rows: int, place: str) -> dict[str, Any]:
    from horovod_spark_runner import TFTransformer

    before = workers(spark)
    peak = Peak()
    peak.begin("load")
    transformer = TFTransformer.load(place)
    peak.begin("transform")
    found = predicted(transformer, rows_of(spark, rows))
    peak.begin("import")
    import keras  # noqa: F401  # what it takes itself is not the model's

    peak.begin("getModel")
    held = transformer.getModel().count_params()
    # TensorFlow itself takes most of what a worker has besides the model.
    steps = {**peak.steps, "worker": workers(spark) - before}
    return {"steps": steps, "found": found, "held": held}


def train(spark: SparkSession, rows: int, place: str) -> dict[str, Any]:
    from horovod_spark_runner import TFTransformer, run_training

    def model_fn() -> Any:
        import keras

        layers = [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(rows, WIDTH, embeddings_initializer="zeros"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, kernel_initializer="ones", bias_initializer="ones"),
        ]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    def still() -> Any:
        model = model_fn()
        model.compile("sgd", "mse")
        model.optimizer.learning_rate = 0.0
        return model

    frame = rows_of(spark, rows)
    labelled = frame.selectExpr("features", "cast(id as float) as label")
    peak = Peak()
    peak.begin("run_training")
    trained = run_training(labelled, model_fn, num_workers=2, batch_size=2, run_dir=place)
    peak.begin("from_run")
    again = TFTransformer.from_run(place)
    wanted, found = predicted(trained, frame), predicted(again, frame)
    # A model that stays as it was begun: with those weights.
    peak.begin("initial_weights")
    warm = run_training(
        labelled, still, num_workers=1, initial_weights=place, run_dir=f"{place}-warm"
    )
    peak.begin("")
    return {
        "steps": peak.steps,
        "wanted": [wanted, wanted],
        "found": [found, predicted(warm, frame)],
    }


def connect(spark: SparkSession, rows: int, place: str) -> dict[str, Any]:
    """Predict with a stage that was saved, through Spark Connect, whose messages are small."""
    from horovod_spark_runner import TFTransformer

    peak = Peak()
    peak.begin("load")
    transformer = TFTransformer.load(place)
    peak.begin("transform")
    found = predicted(transformer, rows_of(spark, rows))
    peak.begin("again")
    again = predicted(TFTransformer.load(place), rows_of(spark, rows))
    return {"steps": peak.steps, "wanted": found, "found": again}


def main() -> None:
    kind, rows, place = sys.argv[1:]
    # A Spark Connect server chooses a port that is free.
    if kind == "connect":
        os.environ["SPARK_TESTING"] = "1"
    builder: Any = SparkSession.builder
    # Every worker of Spark's imports TensorFlow; two ranks need two.
    master = "local[2]" if kind == "train" else "local[1]"
    spark = (
        (builder.remote(master) if kind == "connect" else builder.master(master))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    steps = {"adopt": adopt, "load": load, "train": train, "connect": connect}
    print(json.dumps(steps[kind](spark, int(rows), place)))


if __name__ == "__main__":
    main()
