"""How long one row takes through an exported pipeline, in one process without Spark.

The pipeline of ``examples/flights_pipeline.py`` is fitted, exported as one ONNX file and scored row
by row; the preparation alone, and with the network. Beside them: columns of many rows, and what
MLeap has published of itself.

Usage: python benchmarks/scoring.py [--write]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers.session import make_session
from report import GOAL_HEAD, goal, present, shown_command, table

ROWS, TURNS, REPEATS = 100_000, 2000, 5
NUMBERS = ["dep_delay", "distance", "hour", "month", "weekday"]
CARRIERS = ["UA", "B6", "EV", "DL", "AA", "MQ", "US", "9E", "WN", "VX", "FL", "AS", "F9", "YV"]
MLEAP = """MLeap, which scores on the JVM, has published of itself, for a pipeline of assemblers,
scalers, indexers and encoders with a model at its end, on a machine of its authors' that it does
not name ([FAQ](https://combust.github.io/mleap-docs/faq.html)): 0.0062 ms per row with a linear
regression, 0.0068 ms with a random forest, as means over thousands of rows; Spark itself, on a
DataFrame of one row: 106 and 101 ms. The figures above are of another machine, in Python."""


def make_rows() -> dict[str, list[Any]]:
    draw = np.random.default_rng(5)
    rows: dict[str, list[Any]] = {name: draw.normal(0, 9, ROWS).tolist() for name in NUMBERS}
    rows["carrier"] = draw.choice(CARRIERS, ROWS).tolist()
    rows["origin"] = draw.choice(["EWR", "JFK", "LGA"], ROWS).tolist()
    return rows


def export(folder: Path, rows: dict[str, list[Any]]) -> None:
    """Write the preparation and the whole pipeline."""
    import keras
    import pandas as pd
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml import feature as ml

    from horovod_spark_runner import TFTransformer, export_pipeline

    spark = make_session(2, "2g")
    frame = spark.createDataFrame(pd.DataFrame(rows))
    names = ["carrier", "origin"]
    indices, vectors = [f"{name}_index" for name in names], [f"{name}_vector" for name in names]
    prepared = Pipeline(
        stages=[
            ml.StringIndexer(inputCols=names, outputCols=indices, handleInvalid="keep"),
            ml.OneHotEncoder(inputCols=indices, outputCols=vectors),
            ml.VectorAssembler(inputCols=[*NUMBERS, *vectors], outputCol="features"),
        ]
    ).fit(frame)
    width = len(prepared.transform(frame).first()["features"])
    layers = [keras.layers.Dense(n, activation="relu") for n in (64, 32)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
    network = TFTransformer.from_keras(model, ["features"])
    whole = PipelineModel([prepared, network])
    export_pipeline(prepared, folder / "prepared.onnx", frame)
    export_pipeline(whole, folder / "flights.onnx", frame)
    spark.stop()


def percentiles(score: Callable[[dict[str, Any]], Any], rows: list[dict[str, Any]]) -> list[float]:
    """Return the median and the 99th percentile of one row's time, in milliseconds."""
    times = []
    for turn in range(TURNS + 100):
        began = time.perf_counter()
        score(rows[turn % len(rows)])
        times.append(1000 * (time.perf_counter() - began))
    return [float(np.percentile(times[100:], part)) for part in (50, 99)]


def measure(path: Path, rows: dict[str, list[Any]]) -> list[float]:
    """Return the median and the 99th percentile of one row, in ms, and rows per second of all."""
    from horovod_spark_runner.training.onnx import OnnxSession

    session = OnnxSession(path.read_bytes())
    whole = {n: np.array(rows[n], float if n in NUMBERS else object) for n in session.inputs}
    single = [{n: a[row : row + 1] for n, a in whole.items()} for row in range(1000)]
    median, late = percentiles(session, single)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        session(whole)
        times.append(time.perf_counter() - began)
    return [median, late, ROWS / min(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = make_rows()
    with tempfile.TemporaryDirectory(prefix="hsr-benchmark-") as folder:
        export(Path(folder), rows)
        found = [measure(Path(folder, name), rows) for name in ("prepared.onnx", "flights.onnx")]
    cells = [
        [what, f"{median:.3f}", f"{late:.3f}", f"{rate:,.0f}"]
        for what, (median, late, rate) in zip(
            ("flights, preparation alone", "flights, with the network"), found, strict=True
        )
    ]
    text = "\n\n".join(
        [
            f"{TURNS:,} rows, one at a time; columns of {ROWS:,} rows, best of {REPEATS}.",
            table(["Pipeline, as one ONNX file", "p50, ms", "p99, ms", "Columns, rows/s"], cells),
            MLEAP,
            table(GOAL_HEAD, [goal("p50 of the preparation, ms", found[0][0], at_most=1.0)]),
        ]
    )
    present("Scoring without Spark", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
