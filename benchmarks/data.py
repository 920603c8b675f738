"""The data path against its peers, on the same files, in one run.

Writes: materializing against a plain ``df.write.parquet`` of the same columns. Reads, one process:
raw pyarrow row groups (the limit), our shuffled batches as TensorFlow tensors and through
``model.fit``, and Petastorm's readers, in an environment where they work (made by this script
under ``~/.cache/horovod_spark_runner``). Every figure is the best of several repeats, which
alternate, so that a change of load meets all of them. The start of Petastorm's readers, seconds,
does not count.

Usage: python benchmarks/data.py [--rows 200000] [--batch-size 256] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import present, table

CACHE = Path.home() / ".cache" / "horovod_spark_runner" / "petastorm-reader"
# The newest that Petastorm's readers work with.
PACKAGES = (
    "petastorm==0.13.1",
    "pyarrow==14.0.2",
    "numpy==1.26.4",
    "pandas<2.3",
    "pyspark==3.5.9",
    "tensorflow-cpu==2.16.2",
    "setuptools<70",
)
WIDTH = 64
# Epochs that Petastorm's readers and model.fit take, so that what was read ahead counts little.
EPOCHS = 4
# Steps that model.fit runs at a time: one by one its own cost hides the reader's.
AT_ONCE = (1, 32)
ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}


def set_up_petastorm() -> Path:
    """Make the environment of Petastorm's readers, once; return its Python."""
    python = CACHE / "bin" / "python"
    if not (CACHE / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", CACHE], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        (CACHE / "complete").touch()
    return python


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

    def materialize(self) -> Any:
        from horovod_spark_runner.data.materialize import DataRequest, materialize
        from horovod_spark_runner.data.schema import Roles
        from horovod_spark_runner.storage.filesystem import Location

        roles = Roles(("features",), ("label",), "weight")
        request = DataRequest(roles, reuse=False)
        return materialize(self.frame, request, Location(self.folder / "data")).manifest


def read_raw(manifest: Any) -> None:
    """Read all row groups into Arrow tables: what no reader can beat."""
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


def time_fit(batches: Any, manifest: Any, batch_size: int, at_once: int) -> float:
    """Return the seconds that ``model.fit`` takes for the rows of one epoch."""
    import keras

    model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=at_once)
    steps = EPOCHS * (manifest.rows // batch_size) // at_once * at_once
    model.fit(batches, steps_per_epoch=2 * max(AT_ONCE), verbose=0)  # compiled
    begin = time.perf_counter()
    model.fit(batches, steps_per_epoch=steps, verbose=0)
    return (time.perf_counter() - begin) * manifest.rows / (steps * batch_size)


def fit(manifest: Any, batch_size: int, at_once: int) -> float:
    """Time ``model.fit`` on our batches."""
    from horovod_spark_runner import Dataset

    batches = Dataset(manifest).tf_dataset(
        "features", "label", rank=0, size=1, batch_size=batch_size
    )
    return time_fit(batches, manifest, batch_size, at_once)


def fit_memory(manifest: Any, batch_size: int, at_once: int) -> float:
    """Time ``model.fit`` on arrays in memory, in order: what no reader can beat."""
    import numpy as np
    import tensorflow as tf

    features = np.random.default_rng(0).random((manifest.rows, WIDTH), np.float32)
    labels = np.zeros(manifest.rows, np.int32)
    rows = tf.data.Dataset.from_tensor_slices((features, labels))
    batches = rows.batch(batch_size, drop_remainder=True).repeat().prefetch(8)
    return time_fit(batches, manifest, batch_size, at_once)


def read_petastorm(python: Path, manifest: Any, batch_size: int) -> dict[str, float]:
    """Return seconds by reader, and the rows that were lost, of one repeat."""
    folder = Path(manifest.url, manifest.files[0]).parent
    script = Path(__file__).resolve().parent / "peers" / "petastorm_reader.py"
    arguments = [str(folder), *map(str, (manifest.rows, batch_size, EPOCHS, *AT_ONCE))]
    run = subprocess.run(
        [python, script, *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-3000:])
    found: dict[str, float] = {"lost": 0}
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            values = json.loads(line)
            found["lost"] += values.pop("lost", 0)
            found.update(values)
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the best seconds of everything, and how many rows Petastorm lost."""
    python = set_up_petastorm()
    writing = Writing(folder, arguments.rows)
    best: dict[str, float] = {}
    lost = 0.0

    def keep(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    writing.plain()  # warm
    manifest = writing.materialize()
    for _ in range(arguments.repeats):
        keep("plain", timed(writing.plain))
        keep("materialize", timed(writing.materialize))
    writing.spark.stop()
    read_raw(manifest)
    read_tensors(manifest, arguments.batch_size, 0)
    for repeat in range(arguments.repeats):
        keep("raw", timed(lambda: read_raw(manifest)))
        epoch = repeat + 1
        keep("tensors", timed(lambda e=epoch: read_tensors(manifest, arguments.batch_size, e)))
        for at_once in AT_ONCE:
            keep(f"our_fit_{at_once}", fit(manifest, arguments.batch_size, at_once))
            keep(f"memory_fit_{at_once}", fit_memory(manifest, arguments.batch_size, at_once))
        found = read_petastorm(python, manifest, arguments.batch_size)
        lost += found.pop("lost")
        for name, seconds in found.items():
            keep(name, seconds)
    return {**best, "lost": lost}


def report(best: dict[str, float], arguments: argparse.Namespace, load: str) -> str:
    """Return the results as Markdown. Pure."""
    rates = {name: arguments.rows / s for name, s in best.items() if name != "lost"}
    titles = {
        "plain": "plain `df.write.parquet`",
        "materialize": "materialize (Petastorm's converter, checks, manifest)",
        "raw": "raw pyarrow row groups, the limit",
        "tensors": "shuffled batches as TensorFlow tensors",
        "make_tf_dataset": "Petastorm `make_tf_dataset`, defaults, once it runs",
        "make_batch_reader": "Petastorm `make_batch_reader`, bare",
    }
    fits = []
    for n in AT_ONCE:
        way = "`model.fit`, " + ("step by step" if n == 1 else f"{n} steps per execution")
        titles[f"memory_fit_{n}"] = f"arrays in memory through {way}, the limit"
        titles[f"our_fit_{n}"] = f"shuffled batches through {way}"
        titles[f"fit_{n}"] = f"Petastorm `make_tf_dataset` through {way}"
        ratio = rates[f"our_fit_{n}"] / rates[f"fit_{n}"]
        fits.append((f"{way} / Petastorm's `model.fit`", ratio, "≥ 2.5"))
    goals = [
        ("tensors / `make_tf_dataset`", rates["tensors"] / rates["make_tf_dataset"], "≥ 5"),
        ("tensors / raw limit", rates["tensors"] / rates["raw"], "≥ 0.45"),
        *fits,
        ("time to materialize / plain write", best["materialize"] / best["plain"], "≤ 1.1"),
    ]
    return "\n\n".join(
        [
            f"{arguments.rows:,} rows of {WIDTH + 2} numbers, batches of {arguments.batch_size}, "
            f"best of {arguments.repeats}; load average at the start {load}.",
            table(["What", "Rows/s"], [[t, f"{rates[name]:,.0f}"] for name, t in titles.items()]),
            table(["Ratio", "Measured", "Goal"], [[t, f"{v:.2f}", g] for t, v, g in goals]),
            f"Rows that Petastorm's readers lost on the way: {best['lost']:,.0f}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmark of the data path")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    load = f"{os.getloadavg()[0]:.1f}"
    folder = Path(tempfile.mkdtemp(prefix="hsr-benchmark-"))
    try:
        best = measure(arguments, folder)
        text = report(best, arguments, load)
        present("Data", "python benchmarks/data.py", text, write=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
