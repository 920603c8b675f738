"""Petastorm's own readers on a folder of Parquet files; run in an environment where they work.

Usage: python petastorm_reader.py FOLDER ROWS WIDTH BATCH_SIZE EPOCHS [AT_ONCE…]; prints JSON, a
line each: seconds per epoch by reader, for each number of workers, and of ``model.fit`` on batches
put together of whole row groups, for each number of steps at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf
from petastorm import make_batch_reader
from petastorm.tf_utils import make_petastorm_dataset

WORKERS = (1, 2, 4)
COLUMNS = ["features", "label"]


def time_batches(batches: Iterable[Any]) -> tuple[int, int, float]:
    """Return all rows, and the rows and seconds after the first batch: without the start."""
    rows = first = 0
    begin = 0.0
    for batch in batches:
        rows += int(batch.label.shape[0])
        if not first:
            first, begin = rows, time.perf_counter()
    return rows, rows - first, time.perf_counter() - begin


class Reader:
    """Reads the columns ``features`` and ``label`` of one folder in Petastorm's ways."""

    def __init__(self, folder: Path, rows: int, width: int, batch_size: int, epochs: int) -> None:
        from petastorm.spark.spark_dataset_converter import SparkDatasetConverter

        self.files = [file.as_uri() for file in sorted(folder.glob("*.parquet"))]
        self.converter = SparkDatasetConverter(folder.as_uri(), self.files, rows)
        self.rows, self.width, self.batch_size, self.epochs = rows, width, batch_size, epochs

    def tell(self, name: str, counted: tuple[int, int, float]) -> None:
        """Print the seconds per epoch, and the rows that are missing."""
        seen, timed, seconds = counted
        told: dict[str, float] = {"lost": self.rows * self.epochs - seen}
        if timed:  # else all that came was one batch
            told[name] = seconds * self.rows / timed
        print(json.dumps(told), flush=True)

    def read(self, workers: int) -> None:
        """Time the readers: row by row, bare row groups, and batches made of row groups."""
        options = {"workers_count": workers, "num_epochs": self.epochs, "schema_fields": COLUMNS}
        with self.converter.make_tf_dataset(batch_size=self.batch_size, **options) as dataset:
            self.tell(f"make_tf_dataset_{workers}", time_batches(dataset))
        with make_batch_reader(self.files, **options) as reader:
            self.tell(f"make_batch_reader_{workers}", time_batches(reader))
        with make_batch_reader(self.files, **options) as reader:
            batches = make_petastorm_dataset(reader).rebatch(self.batch_size)
            self.tell(f"make_petastorm_dataset_{workers}", time_batches(batches))

    def fit(self, at_once: int, workers: int) -> None:
        """Time ``model.fit`` after a first epoch, in which it is compiled."""
        shape = (-1, self.width)
        layers = [tf.keras.layers.Input((self.width,)), tf.keras.layers.Dense(1)]
        model = tf.keras.Sequential(layers)
        model.compile("sgd", "mse", steps_per_execution=at_once)
        ends: list[float] = []
        watch = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
        )
        steps = self.rows // self.batch_size // at_once * at_once
        with make_batch_reader(
            self.files, num_epochs=None, workers_count=workers, schema_fields=COLUMNS
        ) as reader:
            pairs = make_petastorm_dataset(reader)
            pairs = pairs.map(lambda row: (tf.reshape(row.features, shape), row.label))
            pairs = pairs.rebatch(self.batch_size).prefetch(tf.data.AUTOTUNE)
            model.fit(
                pairs, steps_per_epoch=steps, epochs=1 + self.epochs, verbose=0, callbacks=[watch]
            )
        seconds = (ends[-1] - ends[0]) / self.epochs
        print(json.dumps({f"fit_{at_once}": seconds * self.rows / (steps * self.batch_size)}))


def main() -> None:
    reader = Reader(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
    for workers in WORKERS:
        reader.read(workers)
        for at_once in map(int, sys.argv[6:]):
            reader.fit(at_once, workers)


if __name__ == "__main__":
    main()
