"""Whether a long training grows: memory by kind of process, files, and the report's size.

``run_training`` on two ranks with validation, a checkpoint and event files after each of many short
epochs; call after call continues the same run directory. Twice a minute the memory of the driver's
Python and of all processes below it is noted (PSS). Compared are the medians of the first and the
last quarter of a session, without its first two minutes. The run is kept under ``--folder``: the
command, given again, continues it in a new session, so that hours can be had in pieces; the table
is of all sessions so far.

Usage: python benchmarks/long_run.py --folder DIR [--minutes 30] [--rows 2000] [--write]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory import COLUMNS, memory_by_kind
from report import present, shown_command, table

from horovod_spark_runner.machine import repeat_in_thread

# Seconds between samples, and of a session before its first quarter.
PAUSE, WARM_UP = 30.0, 120.0
WIDTH, EPOCHS = 16, 1_000


def note_sample(place: Path, run: Path, began: float) -> None:
    """Append a line of JSON to a file: memory, and what is in the run directory.

    Args:
        place: the file.
        run: the run directory.
        began: when the session began.
    """
    report = run / "report.html"
    sample = {
        "session": began,
        "seconds": time.time() - began,
        "memory": {kind: pss for kind, (pss, _) in memory_by_kind().items()},
        "files": sum(len(files) for _, _, files in os.walk(run)),  # some vanish meanwhile
        "epochs": epochs_of(run),
        "report": report.stat().st_size if report.exists() else 0,
    }
    with place.open("a") as file:
        file.write(json.dumps(sample) + "\n")


def make_model() -> Any:
    import keras

    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(8, "relu")])
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse")
    return model


def train(folder: Path, minutes: float, rows: int) -> None:
    """Train for so long, in several calls of one session, as the same run."""
    from peers.session import make_session
    from pyspark.sql import functions as F

    from horovod_spark_runner import run_training

    spark = make_session(2, "1g")
    features = F.array(*(F.rand(i).cast("float") for i in range(WIDTH)))
    frame = spark.range(0, rows, 1, 4).select(features.alias("features"))
    frame = frame.withColumn("label", F.col("features")[0])
    run, ends = folder / "run", time.monotonic() + 60 * minutes
    note = functools.partial(note_sample, folder / "samples.jsonl", run, time.time())
    with repeat_in_thread(note, "memory", every=PAUSE):
        while time.monotonic() < ends:
            run_training(
                frame,
                make_model,
                feature_cols=["features"],
                label_cols=["label"],
                num_workers=2,
                batch_size=64,
                epochs=epochs_of(run) + EPOCHS,
                validation=0.2,
                run_dir=str(run),
                stream_logs=False,
            )
    spark.stop()


def epochs_of(run: Path) -> int:
    """Return how many epochs a run has."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def growth_of(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row of the table for each session. Pure."""
    sessions: dict[float, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        if sample["seconds"] > WARM_UP:
            sessions[sample["session"]].append(sample)
    rows = []
    for part in sessions.values():
        quarter = max(1, len(part) // 4)
        first, last = part[:quarter], part[-quarter:]
        cells = []
        for kind in COLUMNS:
            both = [
                statistics.median(sample["memory"].get(kind, 0) for sample in some) / 2**20
                for some in (first, last)
            ]
            cells.append(f"{both[0]:,.0f} → {both[1]:,.0f}")
        end = part[-1]
        facts = [f"{end['epochs']:,}", f"{end['files']:,}", f"{end['report'] / 1e6:.2f} MB"]
        rows.append([f"{end['seconds'] / 60:.0f} min", *cells, *facts])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="keeps the run and the samples")
    parser.add_argument("--minutes", type=float, default=30.0, help="of this session (30)")
    parser.add_argument("--rows", type=int, default=2_000, help="of the DataFrame (2,000)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train(arguments.folder, arguments.minutes, arguments.rows)
    lines = (arguments.folder / "samples.jsonl").read_text().splitlines()
    head = ["session", *COLUMNS, "epochs", "files", "report"]
    text = (
        f"Two ranks, calls of {EPOCHS} epochs with validation, a checkpoint and event files after "
        "each, one after the other in one run directory. Medians of MB (PSS), the first quarter of "
        "a session → its last, without its first two minutes; at its end, the run's epochs and "
        "files, and the size of the report.\n\n"
        + table(head, growth_of([json.loads(line) for line in lines]))
    )
    present("Long runs", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
