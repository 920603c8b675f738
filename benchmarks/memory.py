"""How much memory a training takes at its peak, process by process, by the size of the data.

``run_training`` on two ranks, with data below and far above the shuffle window; memory of the
driver's Python and of all processes below it, sampled ten times a second and added up by kind:
with pages that several processes map shared out among them (PSS), and counted in full for each of
them (RSS). In comparison: a plain Keras script with the same rows as arrays in memory. Every size
has a session of its own, as a JVM's heap does not shrink. The first training of a session is small
and does not count: it loads what every run needs.

Usage: python benchmarks/memory.py [--sizes ROWS...] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from report import output_of, present, shown_command, table

from horovod_spark_runner.machine import repeat_in_thread

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
        peak[0], peak[1] = max(peak[0], info.pss), max(peak[1], info.rss)
        time.sleep(0.1)
threading.Thread(target=sample, daemon=True).start()
x = np.random.default_rng(0).random((rows, 64), np.float32)
dense = keras.layers.Dense
model = keras.Sequential([keras.Input((64,)), dense(64, "relu"), dense(1)])
model.compile("adam", "mse")
model.fit(x, x[:, 0], batch_size=1024, epochs=2, verbose=0)
print(*peak)
"""
# Kinds of processes below the driver, by the names the processes have.
KINDS = {"java": "JVM", "horovod-rank": "both ranks", "horovod-ready": "ready processes"}
OTHERS = "Spark's Python, MPI"
DRIVER, ALL = "driver", "all"
COLUMNS = [DRIVER, *KINDS.values(), OTHERS, ALL]


def note_peaks(peaks: dict[str, list[int]]) -> None:
    """Raise the peaks of PSS and RSS, in bytes, by kind, to what they are now, if that is more.

    They are of different moments, so those of the kinds add up to more than that of all.
    """
    for name, (pss, rss) in memory_by_kind().items():
        peak = peaks.setdefault(name, [0, 0])
        peak[:] = max(peak[0], pss), max(peak[1], rss)


def memory_by_kind() -> dict[str, tuple[int, int]]:
    """Return the PSS and RSS of this process and of those below it, in bytes, by kind."""
    own = psutil.Process()
    sums: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            kind = DRIVER if process == own else KINDS.get(process.name(), OTHERS)
            info = process.memory_full_info()
            for name in (kind, ALL):
                sums[name] = sums[name][0] + info.pss, sums[name][1] + info.rss
    return sums


def make_model() -> Any:
    import keras

    model = keras.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return model


def train(spark: Any, rows: int, folder: str) -> None:
    from pyspark.sql import functions as F

    from horovod_spark_runner import DataOptions, run_training

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
        data=DataOptions(window_bytes=WINDOW),
        run_dir=str(Path(folder, f"run-{rows}")),
        stream_logs=False,
    )


def measure_plain(rows: int) -> list[int]:
    printed = output_of([sys.executable, "-c", PLAIN, str(rows)])
    return [int(word) for word in printed.split()]


def be_driver(rows: int) -> None:
    """Be the process with the Spark session; print the peaks as JSON."""
    from peers.session import make_session

    spark = make_session(2, "1g")
    with tempfile.TemporaryDirectory() as folder:
        train(spark, 10_000, folder)
        peaks: dict[str, list[int]] = {}
        with repeat_in_thread(functools.partial(note_peaks, peaks), "memory", every=0.1):
            train(spark, rows, folder)
    spark.stop()
    print(json.dumps(peaks))


def measure_ours(rows: int) -> dict[str, list[int]]:
    printed = output_of([sys.executable, __file__, "--driver", str(rows)])
    peaks: dict[str, list[int]] = json.loads(printed.splitlines()[-1])
    return peaks


def cell(peak: list[int]) -> str:
    return " · ".join(f"{value / 2**20:,.0f}" for value in peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="rows of each run")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--driver", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if arguments.driver:
        be_driver(arguments.driver)
        return
    rows = []
    for size in arguments.sizes:
        peaks = measure_ours(size)
        cells = [cell(peaks.get(kind, [0, 0])) for kind in COLUMNS]
        megabytes = f"{size * (WIDTH + 1) * 4 / 2**20:,.0f} MB"
        rows.append([f"{size:,}", megabytes, *cells, cell(measure_plain(size))])
        print(rows[-1], flush=True)
    text = (
        f"Two ranks, rows of {WIDTH + 1} numbers, a shuffle window of {WINDOW // 2**20} MB per "
        "rank and a JVM of at most 1 GB, every size in a session of its own; peaks in MB, of the "
        "sum over the processes of a kind: pages that several processes map shared out among them "
        "(PSS) · counted for each of them (RSS). Kinds peak at different moments, so they add up "
        "to more than all; n = 1.\n\n"
        + table(["rows", "data", *COLUMNS, "plain Keras, rows in memory"], rows)
    )
    present("Memory", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
