"""The data path against its peers, on the same rows, in one run.

Writes: materializing against a plain ``df.write.parquet`` of the same columns, with the same
encoding and with Spark's own; what a user pays for the first ``prepare_dataset`` of a DataFrame
and for the next. Reads, one process: raw pyarrow row groups, our shuffled batches as TensorFlow
tensors, and Petastorm's readers on files as Petastorm lays them out, with the best of 1, 2 and 4
workers, in an environment where they work (made by this script under
``~/.cache/horovod_spark_runner``). Through ``model.fit``, timed from the end of a first epoch on:
against Petastorm where both read from storage in every epoch, and where the rows are kept in
memory against tf.data and plain arrays, which are shuffled in every epoch, too. Every figure is
the best of several repeats, which alternate, so that a change of load meets all of them. Our own
readers are timed with their start; Petastorm's, seconds, without.

Usage: python benchmarks/data.py [--rows 200000] [--batch-size 256] [--repeats 3] [--write]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import petastorm_environment as petastorm
from report import GOAL_HEAD, goal, present, shown_command, table

WIDTH = 64
# Epochs that Petastorm's readers and model.fit take, so that what was read ahead counts little.
EPOCHS = 4
# Steps that model.fit runs at a time: one by one its own cost hides the reader's.
AT_ONCE = (1, 32)
# Shuffle window of the runs that read from storage in every epoch: less than the rows take.
SMALL_WINDOW = 16 * 2**20
WINDOW = 256 * 2**20


def timed(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


class Writing:
    """Materializing and plain writing of the same columns, cached in Spark beforehand."""

    def __init__(self, folder: Path, rows: int) -> None:
        from peers.session import make_session
        from pyspark.sql import functions as F

        self.folder = folder
        self.spark = make_session(2, "4g")
        frame = self.spark.range(0, rows, 1, 4).select(
            F.array(*(F.rand(i).cast("float") for i in range(WIDTH))).alias("features"),
            F.rand(99).cast("float").alias("weight"),
            (F.col("id") % 10).cast("int").alias("label"),
        )
        self.frame = frame.cache()
        self.frame.count()
        self.number = 0

    def plain(self) -> None:
        self.number += 1
        self.frame.write.parquet(str(self.folder / f"plain-{self.number}"))

    def same(self) -> None:
        """Write as plainly, in the encoding and row groups of ours."""
        from horovod_spark_runner.data.prepare.columns import ROW_GROUP_BYTES
        from horovod_spark_runner.data.prepare.materialize import CODEC

        self.number += 1
        writer = self.frame.write.option("compression", CODEC)
        writer = writer.option("parquet.block.size", ROW_GROUP_BYTES)
        writer = writer.option("parquet.enable.dictionary", "false")
        writer.parquet(str(self.folder / f"same-{self.number}"))

    def materialize(self) -> Any:
        from horovod_spark_runner.data.prepare.columns import DataRequest
        from horovod_spark_runner.data.prepare.materialize import materialize
        from horovod_spark_runner.data.prepare.schema import Roles
        from horovod_spark_runner.storage.filesystem import Location

        roles = Roles(("features",), ("label",), "weight")
        request = DataRequest(roles, reuse=False)
        return materialize(self.frame, request, Location(self.folder / "data")).manifest

    def prepare(self, again: bool) -> None:
        """Do what a user calls, into a folder that is new or has the rows already."""
        from horovod_spark_runner import prepare_dataset

        self.number += not again
        folder = self.folder / f"prepared-{self.number}"
        prepare_dataset(self.frame, ["features", "weight", "label"], data_dir=str(folder))


def lay_out(manifest: Any, folder: Path) -> None:
    """Write the rows as Petastorm's converter does by default: large row groups, no compression."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    features = pa.list_(pa.float32())
    for number, name in enumerate(manifest.files):
        rows = pq.read_table(Path(manifest.url, name))
        place = rows.schema.get_field_index("features")
        rows = rows.set_column(place, "features", rows["features"].cast(features))
        pq.write_table(rows, folder / f"part-{number}.parquet", compression="none")


def read_raw(manifest: Any) -> None:
    """Read all row groups into Arrow tables, one after the other."""
    import pyarrow.parquet as pq

    for name in manifest.files:
        with pq.ParquetFile(Path(manifest.url, name)) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group)


def read_tensors(manifest: Any, batch_size: int, epoch: int) -> None:
    """Read one shuffled epoch as TensorFlow tensors."""
    from horovod_spark_runner import Dataset

    batches = Dataset(manifest).epoch(epoch, rank=0, size=1, batch_size=batch_size, as_tensors=True)
    rows = sum(int(batch["label"].shape[0]) for batch in batches)
    assert rows == manifest.rows


def time_fit(rows: int, batch_size: int, at_once: int, *data: Any) -> float:
    """Return the seconds that ``model.fit`` takes for the rows of an epoch, after the first."""
    import keras

    model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=at_once)
    ends: list[float] = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )
    steps = rows // batch_size // at_once * at_once
    if len(data) == 1:
        options = {"steps_per_epoch": steps}
    else:  # arrays: as many rows as the others take
        options = {"batch_size": batch_size}
        data = tuple(array[: steps * batch_size] for array in data)
    model.fit(*data, epochs=1 + EPOCHS, verbose=0, callbacks=[watch], **options)
    return (ends[-1] - ends[0]) / EPOCHS * rows / (steps * batch_size)


def fit(manifest: Any, batch_size: int, at_once: int, window_bytes: int) -> float:
    """Time ``model.fit`` on our batches."""
    from horovod_spark_runner import Dataset

    batches = Dataset(manifest).tf_dataset(
        "features", "label", rank=0, size=1, batch_size=batch_size, window_bytes=window_bytes
    )
    return time_fit(manifest.rows, batch_size, at_once, batches)


def make_arrays(rows: int) -> tuple[Any, Any]:
    import numpy as np

    features = np.random.default_rng(0).random((rows, WIDTH), np.float32)
    return features, np.arange(rows, dtype=np.int32) % 10


def fit_one_batch(rows: int, batch_size: int, at_once: int) -> float:
    """Time ``model.fit`` on one batch again and again: what no reader can beat."""
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensors(make_arrays(batch_size)).repeat()
    return time_fit(rows, batch_size, at_once, batches.prefetch(tf.data.AUTOTUNE))


def fit_gathered(rows: int, batch_size: int, at_once: int) -> float:
    """Time ``model.fit`` on rows in memory that tf.data gathers by shuffled numbers, its best."""
    import tensorflow as tf

    features, labels = map(tf.constant, make_arrays(rows))
    whole = rows // batch_size * batch_size

    def shuffled(_: Any) -> Any:
        numbers = tf.random.shuffle(tf.range(rows))[:whole]
        return tf.data.Dataset.from_tensor_slices(tf.reshape(numbers, (-1, batch_size)))

    batches = tf.data.Dataset.range(1).repeat().flat_map(shuffled)
    pairs = batches.map(
        lambda numbers: (tf.gather(features, numbers), tf.gather(labels, numbers)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return time_fit(rows, batch_size, at_once, pairs.prefetch(tf.data.AUTOTUNE))


def fit_arrays(rows: int, batch_size: int, at_once: int) -> float:
    """Time plain ``model.fit`` on arrays."""
    return time_fit(rows, batch_size, at_once, *make_arrays(rows))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the best seconds of everything, and how many rows Petastorm lost."""
    petastorm.set_up()
    writing = Writing(folder, arguments.rows)
    best: dict[str, float] = {}
    lost = 0.0

    def keep(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    for warm in (writing.plain, writing.same, lambda: writing.prepare(again=False)):
        warm()
    manifest = writing.materialize()
    for _ in range(arguments.repeats):
        keep("plain", timed(writing.plain))
        keep("same", timed(writing.same))
        keep("materialize", timed(writing.materialize))
        keep("prepare", timed(lambda: writing.prepare(again=False)))
        keep("found", timed(lambda: writing.prepare(again=True)))
    writing.spark.stop()
    lay_out(manifest, folder / "petastorm")
    read_raw(manifest)
    read_tensors(manifest, arguments.batch_size, 0)
    rows, batch_size = manifest.rows, arguments.batch_size
    for repeat in range(arguments.repeats):
        keep("raw", timed(lambda: read_raw(manifest)))
        epoch = repeat + 1
        keep("tensors", timed(lambda e=epoch: read_tensors(manifest, batch_size, e)))
        for n in AT_ONCE:
            keep(f"our_fit_{n}", fit(manifest, batch_size, n, SMALL_WINDOW))
            keep(f"our_kept_{n}", fit(manifest, batch_size, n, WINDOW))
            keep(f"limit_{n}", fit_one_batch(rows, batch_size, n))
            keep(f"gathered_{n}", fit_gathered(rows, batch_size, n))
            keep(f"arrays_{n}", fit_arrays(rows, batch_size, n))
        found = petastorm.read(
            folder / "petastorm",
            rows=rows,
            width=WIDTH,
            batch_size=batch_size,
            epochs=EPOCHS,
            at_once=AT_ONCE,
        )
        lost += found.pop("lost")
        for name, seconds in found.items():
            keep(name, seconds)
    return {**best, "lost": lost}


def report(best: dict[str, float], arguments: argparse.Namespace, load: str) -> str:
    """Return the results as Markdown. Pure."""
    rates = {name: arguments.rows / s for name, s in best.items() if name != "lost"}
    titles = {
        "plain": "`df.write.parquet`, Spark's own encoding",
        "same": "`df.write.parquet`, our encoding and row groups",
        "materialize": "materialize (Petastorm's converter, checks, manifest)",
        "prepare": "`prepare_dataset`, first call: fingerprint and search, too",
        "found": "`prepare_dataset`, rows found again",
        "raw": "raw pyarrow row groups, one after the other",
        "tensors": "shuffled batches as TensorFlow tensors",
        "make_batch_reader": "Petastorm's bare row groups (`make_batch_reader`)",
        "make_petastorm_dataset": "Petastorm's row groups cut into batches, not shuffled",
        "make_tf_dataset": "Petastorm `make_tf_dataset`, shuffled row by row",
    }
    fits = []
    for n in AT_ONCE:
        way = "`model.fit`, " + ("step by step" if n == 1 else f"{n} steps per execution")
        titles[f"limit_{n}"] = f"{way}: one batch again and again, the limit"
        titles[f"our_fit_{n}"] = f"{way}: shuffled batches, read in every epoch"
        titles[f"fit_{n}"] = f"{way}: Petastorm's row groups cut into batches, not shuffled"
        titles[f"our_kept_{n}"] = f"{way}: shuffled batches, kept in memory"
        titles[f"gathered_{n}"] = f"{way}: tf.data gathers rows in memory by shuffled numbers"
        titles[f"arrays_{n}"] = f"{way}: plain arrays"
        read = rates[f"our_fit_{n}"] / rates[f"fit_{n}"]
        peers = max(rates[f"gathered_{n}"], rates[f"arrays_{n}"])
        fits.append(goal(f"{way}, read / Petastorm's best", read, at_least=2.5))
        kept = rates[f"our_kept_{n}"] / peers
        fits.append([f"{way}, kept / the better of tf.data and arrays", f"{kept:.2f}", "", ""])
    shuffled = rates["tensors"] / rates["make_tf_dataset"]
    fastest = rates["tensors"] / max(rates["make_tf_dataset"], rates["make_petastorm_dataset"])
    goals = [
        goal("tensors / Petastorm's shuffled ones", shuffled, at_least=5),
        ["tensors / Petastorm's fastest", f"{fastest:.2f}", "", ""],
        goal("tensors / raw row groups", rates["tensors"] / rates["raw"], at_least=0.45),
        *fits,
        goal("materialize / same encoding", best["materialize"] / best["same"], at_most=1.1),
        goal("materialize / plain write", best["materialize"] / best["plain"], at_most=1.1),
        ["`prepare_dataset` / plain write", f"{best['prepare'] / best['plain']:.2f}", "", ""],
    ]
    return "\n\n".join(
        [
            f"{arguments.rows:,} rows of {WIDTH + 2} numbers, batches of {arguments.batch_size}, "
            f"best of n = {arguments.repeats}; load average at the start {load}. Petastorm's with "
            "the best of 1, 2 and 4 workers.",
            table(["What", "Rows/s"], [[t, f"{rates[name]:,.0f}"] for name, t in titles.items()]),
            table(GOAL_HEAD, goals),
            f"Rows that Petastorm's readers lost on the way: {best['lost']:,.0f}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmark of the data path")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    size = arguments.rows * 4 * (WIDTH + 1)
    if not 2 * SMALL_WINDOW < size < WINDOW:
        parser.error("the rows must take more than the small shuffle window, and fit the large one")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    load = f"{os.getloadavg()[0]:.1f}"
    folder = Path(tempfile.mkdtemp(prefix="hsr-benchmark-"))
    try:
        best = measure(arguments, folder)
        text = report(best, arguments, load)
        present("Data", shown_command(), text, arguments.write)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
