"""Petastorm's own readers on a folder of Parquet files; run in an environment where they work.

Usage: python petastorm_reader.py FOLDER ROWS WIDTH BATCH_SIZE EPOCHS [AT_ONCE…]; prints JSON, a
line each: seconds per epoch by reader, of each number of workers, and of ``model.fit`` with the
best of them for each number of steps at once, read anew each epoch and kept by tf.data.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORKERS = (1, 2, 4)


def time_batches(batches: Iterable[Any]) -> tuple[int, int, float]:
    """Return all rows, and the rows and seconds after the first batch: without the start."""
    rows = first = 0
    begin = 0.0
    for batch in batches:
        rows += len(batch.label)
        if not first:
            first, begin = rows, time.perf_counter()
    return rows, rows - first, time.perf_counter() - begin


class Reader:
    """Reads one folder in Petastorm's ways."""

    def __init__(self, folder: Path, rows: int, width: int, batch_size: int, epochs: int) -> None:
        from petastorm.spark.spark_dataset_converter import SparkDatasetConverter

        self.files = [file.as_uri() for file in sorted(folder.glob("*.parquet"))]
        self.converter = SparkDatasetConverter(folder.as_uri(), self.files, rows)
        self.rows, self.width, self.batch_size, self.epochs = rows, width, batch_size, epochs

    def tell(self, name: str, counted: tuple[int, int, float]) -> float:
        """Print the seconds per epoch, and the rows that are missing; return the former."""
        seen, timed, seconds = counted
        spent = seconds * self.rows / timed
        print(json.dumps({name: spent, "lost": self.rows * self.epochs - seen}), flush=True)
        return spent

    def tensors(self, workers: int) -> float:
        with self.converter.make_tf_dataset(
            batch_size=self.batch_size, num_epochs=self.epochs, workers_count=workers
        ) as dataset:
            return self.tell(f"make_tf_dataset_{workers}", time_batches(dataset))

    def bare(self, workers: int) -> None:
        from petastorm import make_batch_reader

        with make_batch_reader(self.files, num_epochs=self.epochs, workers_count=workers) as reader:
            self.tell(f"make_batch_reader_{workers}", time_batches(reader))

    def fit(self, at_once: int, workers: int, keep: bool) -> None:
        import tensorflow as tf

        shape = (-1, self.width)
        layers = [tf.keras.layers.Input((self.width,)), tf.keras.layers.Dense(1)]
        model = tf.keras.Sequential(layers)
        model.compile("sgd", "mse", steps_per_execution=at_once)
        with self.converter.make_tf_dataset(
            batch_size=self.batch_size, num_epochs=1 if keep else None, workers_count=workers
        ) as dataset:
            pairs = dataset.map(lambda row: (tf.reshape(row.features, shape), row.label))
            if keep:  # and shuffled again in every epoch, as ours are
                pairs = pairs.unbatch().cache().shuffle(self.rows)
                pairs = pairs.batch(self.batch_size, drop_remainder=True).repeat()
                pairs = pairs.prefetch(tf.data.AUTOTUNE)
            per_epoch = self.rows // self.batch_size
            warm = per_epoch if keep else 64  # compiled, readers running, all rows kept
            model.fit(pairs, steps_per_epoch=-(-warm // at_once) * at_once, verbose=0)
            steps = self.epochs * per_epoch // at_once * at_once
            begin = time.perf_counter()
            model.fit(pairs, steps_per_epoch=steps, verbose=0)
            seconds = time.perf_counter() - begin
        name = f"{'kept' if keep else 'fit'}_{at_once}"
        spent = seconds * self.rows / (steps * self.batch_size)
        print(json.dumps({name: spent}), flush=True)


def main() -> None:
    reader = Reader(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
    seconds = {workers: reader.tensors(workers) for workers in WORKERS}
    for workers in WORKERS:
        reader.bare(workers)
    best = min(seconds, key=lambda workers: seconds[workers])
    for at_once in map(int, sys.argv[6:]):
        for keep in (False, True):
            reader.fit(at_once, best, keep)


if __name__ == "__main__":
    main()
