"""Petastorm's own readers on a folder of Parquet files; data.py runs it in another environment.

Usage: python petastorm_reader.py FOLDER ROWS BATCH_SIZE EPOCHS AT_ONCE…; prints JSON: seconds by
reader, and of ``model.fit`` with each number of steps at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def time_batches(batches: Iterable[Any]) -> tuple[int, int, float]:
    """Return all rows, and the rows and seconds after the first batch: without the start."""
    rows = first = 0
    begin = 0.0
    for batch in batches:
        rows += len(batch.label)
        if not first:
            first, begin = rows, time.perf_counter()
    return rows, rows - first, time.perf_counter() - begin


def read_tf_dataset(folder: Path, files: list[str], rows: int, batch: int, epochs: int) -> Any:
    from petastorm.spark.spark_dataset_converter import SparkDatasetConverter

    converter = SparkDatasetConverter(folder.as_uri(), files, rows)
    with converter.make_tf_dataset(batch_size=batch, num_epochs=epochs) as dataset:
        return time_batches(dataset)


def read_batches(folder: Path, files: list[str], rows: int, batch: int, epochs: int) -> Any:
    from petastorm import make_batch_reader

    with make_batch_reader(files, num_epochs=epochs) as reader:
        return time_batches(reader)


def fit(
    folder: Path, files: list[str], rows: int, batch_size: int, epochs: int, at_once: int
) -> None:
    import tensorflow as tf
    from petastorm.spark.spark_dataset_converter import SparkDatasetConverter

    model = tf.keras.Sequential([tf.keras.layers.Input((64,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=at_once)
    converter = SparkDatasetConverter(folder.as_uri(), files, rows)
    with converter.make_tf_dataset(batch_size=batch_size) as dataset:
        pairs = dataset.map(lambda row: (tf.reshape(row.features, (-1, 64)), row.label))
        steps = epochs * (rows // batch_size) // at_once * at_once
        model.fit(pairs, steps_per_epoch=64, verbose=0)  # compiled, readers running
        begin = time.perf_counter()
        model.fit(pairs, steps_per_epoch=steps, verbose=0)
        seconds = time.perf_counter() - begin
    print(json.dumps({f"fit_{at_once}": seconds * rows / (steps * batch_size)}), flush=True)


def main() -> None:
    folder, rows, batch_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    files = [file.as_uri() for file in sorted(folder.glob("*.parquet"))]
    readers = {"make_tf_dataset": read_tf_dataset, "make_batch_reader": read_batches}
    epochs = int(sys.argv[4])
    for name, read in readers.items():
        seen, timed, seconds = read(folder, files, rows, batch_size, epochs)
        result = {name: seconds * rows / timed, "lost": rows * epochs - seen}
        print(json.dumps(result), flush=True)
    for at_once in map(int, sys.argv[5:]):
        fit(folder, files, rows, batch_size, epochs, at_once)


if __name__ == "__main__":
    main()
