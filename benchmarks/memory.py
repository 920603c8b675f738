"""How much memory a training takes at its peak, process by process, by the size of the data.

``run_training`` on two ranks, with data below and far above the shuffle window; resident memory of
the driver's Python, Spark's JVM, every rank and the ready process, sampled ten times a second; the
part that is theirs alone (USS) and all that they map (RSS). In comparison: a plain Keras script
with the same rows as arrays in memory. The first training of the session is small, and counts for
none: it loads what every run needs.

Usage: python benchmarks/memory.py [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from report import present, table

WIDTH = 64
WINDOW = 64 * 2**20
SIZES = (100_000, 2_000_000)
PLAIN = """
import sys, keras, numpy as np, psutil, threading, time
rows = int(sys.argv[1])
peak = [0, 0]
def sample():
    while True:
        info = psutil.Process().memory_full_info()
        peak[0], peak[1] = max(peak[0], info.uss), max(peak[1], info.rss)
        time.sleep(0.1)
threading.Thread(target=sample, daemon=True).start()
x = np.random.default_rng(0).random((rows, 64), np.float32)
dense = keras.layers.Dense
model = keras.Sequential([keras.Input((64,)), dense(64, "relu"), dense(1)])
model.compile("adam", "mse")
model.fit(x, x[:, 0], batch_size=1024, epochs=2, verbose=0)
print(*peak)
"""
# What processes are called, and how many of a kind there are at most.
KINDS = {"java": "JVM", "horovod-rank": "each rank", "horovod-ready": "ready process"}


class Sampler:
    """Notes the peaks of this process and those below it; use as a context manager."""

    def __init__(self) -> None:
        self.peaks: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._ended.wait(0.1):
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    kind = "driver" if process == own else KINDS.get(process.name())
                    if kind is not None:
                        info = process.memory_full_info()
                        peak = self.peaks[kind]
                        peak[:] = max(peak[0], info.uss), max(peak[1], info.rss)


def make_model() -> Any:
    import keras

    model = keras.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return model


def train(spark: Any, rows: int, folder: str) -> None:
    from pyspark.sql import functions as F

    from horovod_spark_runner import run_training

    features = F.array(*(F.rand(i).cast("float") for i in range(WIDTH)))
    frame = spark.range(0, rows, 1, 4).select(features.alias("features"))
    run_training(
        frame.withColumn("label", F.col("features")[0]),
        make_model,
        feature_cols=["features"],
        label_cols=["label"],
        num_workers=2,
        batch_size=512,
        epochs=2,
        window_bytes=WINDOW,
        run_dir=str(Path(folder, f"run-{rows}")),
        verbose=False,
    )


def measure_plain(rows: int) -> list[int]:
    command = [sys.executable, "-c", PLAIN, str(rows)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return [int(word) for word in done.stdout.split()]


def cell(peak: list[int]) -> str:
    return " · ".join(f"{value / 2**20:,.0f}" for value in peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from peers.session import make_session

    spark = make_session(2, "1g")
    kinds = ["driver", *KINDS.values()]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        train(spark, 10_000, folder)
        for size in SIZES:
            with Sampler() as sampler:
                train(spark, size, folder)
            cells = [cell(sampler.peaks[kind]) for kind in kinds]
            megabytes = f"{size * (WIDTH + 1) * 4 / 2**20:,.0f} MB"
            rows.append([f"{size:,}", megabytes, *cells, cell(measure_plain(size))])
            print(rows[-1], flush=True)
    spark.stop()
    text = (
        f"Two ranks, rows of {WIDTH + 1} numbers, a shuffle window of {WINDOW // 2**20} MB per "
        "rank and a JVM of at most 1 GB; peaks in MB, of memory that is a process's own (USS) · of "
        "all that it maps (RSS), n = 1.\n\n"
        + table(["rows", "data", *kinds, "plain Keras, rows in memory"], rows)
    )
    present("Memory", "python benchmarks/memory.py --write", text, arguments.write)


if __name__ == "__main__":
    main()
