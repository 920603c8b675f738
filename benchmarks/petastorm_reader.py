"""Petastorm's own readers on a folder of Parquet files; data.py runs it in another environment.

Usage: python petastorm_reader.py FOLDER ROWS BATCH_SIZE; prints JSON: seconds by reader.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def tf_batches(dataset: Any) -> int:
    rows = 0
    for batch in dataset:
        rows += int(batch.label.shape[0])
    return rows


def read_tf_dataset(folder: Path, files: list[str], rows: int, batch_size: int) -> int:
    from petastorm.spark.spark_dataset_converter import SparkDatasetConverter

    converter = SparkDatasetConverter(folder.as_uri(), files, rows)
    with converter.make_tf_dataset(batch_size=batch_size, num_epochs=1) as dataset:
        return tf_batches(dataset)


def read_batches(folder: Path, files: list[str], rows: int, batch_size: int) -> int:
    from petastorm import make_batch_reader

    with make_batch_reader(files, num_epochs=1) as reader:
        return sum(len(batch.label) for batch in reader)


def fit(folder: Path, files: list[str], rows: int, batch_size: int) -> int:
    import tensorflow as tf
    from petastorm.spark.spark_dataset_converter import SparkDatasetConverter

    model = tf.keras.Sequential([tf.keras.layers.Input((64,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    converter = SparkDatasetConverter(folder.as_uri(), files, rows)
    with converter.make_tf_dataset(batch_size=batch_size) as dataset:
        pairs = dataset.map(lambda row: (tf.reshape(row.features, (-1, 64)), row.label))
        steps = rows // batch_size
        model.fit(pairs, steps_per_epoch=20, verbose=0)  # compiled, readers running
        begin = time.perf_counter()
        model.fit(pairs, steps_per_epoch=steps, verbose=0)
        seconds = time.perf_counter() - begin
    print(json.dumps({"fit": seconds * rows / (steps * batch_size)}), flush=True)
    return rows


def main() -> None:
    folder, rows, batch_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    files = [file.as_uri() for file in sorted(folder.glob("*.parquet"))]
    readers = {"make_tf_dataset": read_tf_dataset, "make_batch_reader": read_batches}
    for name, read in readers.items():
        begin = time.perf_counter()
        seen = read(folder, files, rows, batch_size)
        seconds = time.perf_counter() - begin
        # It may lose row groups: time per row that came.
        print(json.dumps({name: seconds * rows / max(1, seen), "lost": rows - seen}), flush=True)
    fit(folder, files, rows, batch_size)


if __name__ == "__main__":
    main()
