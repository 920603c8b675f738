"""How fast a trained network predicts through Spark, on all cores: a small MLP and a CNN.

In turns, in one session, over the same Parquet files, each result thrown away (``noop``); floor,
peer and ours have Python workers of their own each, so that none pays for or profits from what
another has loaded:

* the floor: an identity ``mapInArrow`` over all columns, which computes nothing;
* ours: ``transform``, with two batch sizes, and the prediction alone;
* Spark's ``predict_batch_udf`` with a compiled function, with the same two batch sizes, and with
  ``model.predict``, as Spark's documentation shows it (``--framework torch``: with the module in
  inference mode, and with ``torch.compile``); all with Spark's columnar input to UDFs switched
  off, as ``transform`` does by itself;
* the same with five other columns: string, timestamp, decimal, vector, map;
* files to files: ``predict_files`` against Spark's read, ``transform`` and write, with all columns,
  and with a key beside the prediction, by both batch sizes;
* in memory: the compiled network in one process on all cores.

Usage: python benchmarks/inference.py [--framework torch] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pyspark.cloudpickle
from networks import CNN, FRAMEWORKS, MLP, WIDTHS, Networks, Predict
from peers.session import make_session
from report import GOAL_HEAD, goal, output_of, present, shown_command, table

REPEATS = 3
BATCH = 1024
# Rows per call that `transform` and `predict_batch_udf` are tried with.
BATCHES = (BATCH, 8192)
BY_LARGER = f", by {BATCHES[1]:,}"
LARGER = f"`transform`{BY_LARGER}"
SPARK_ALL = "Spark's read, transform, write"
SPARK_KEY = "Spark's, a key and the prediction"
OWN_KEY = "`predict_files`, a key and the prediction"
COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
OTHERS = (
    "cast(id as string) as text",
    "timestamp_micros(id) as at",
    "cast(id / 7 as decimal(20, 4)) as price",
    "map('a', id, 'b', null) as tags",
)
ROWS = {MLP: 400_000, CNN: 100_000}
# How many times as fast as Spark's way files are to be scored: with all columns, and a key alone.
ALL_GOAL, KEY_GOAL = 2.5, 3
QUICK_ROWS = {MLP: 40_000, CNN: 10_000}


def train(framework: Networks, place: Path, name: str) -> None:
    """Leave a run of the network, trained for one step; and what others need of it."""
    from horovod_spark_runner import run_training

    spark = make_session(2, "2g")
    width = WIDTHS[name]
    frame = spark.range(64).selectExpr(
        f"transform(sequence(1, {width}), i -> float(rand())) as features",
        f"array_repeat(0f, {1 if name == MLP else 10}) as label",
    )

    trained = run_training(
        frame,
        framework.model_fn(name),
        feature_cols=["features"],
        label_cols=["label"],
        num_workers=1,
        epochs=1,
        batch_size=64,
        run_dir=str(place),
        stream_logs=False,
    )
    framework.keep(trained, place)
    spark.stop()


def measure_memory(framework: Networks, run: str, name: str, rows: int) -> float:
    """Return rows per second of the network on rows in memory, best of the repeats."""
    predict = framework.predictor(run, name, framework.ways[0])
    values = np.random.default_rng(0).random((rows, WIDTHS[name]), np.float32)
    best = 0.0
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        for begin in range(0, rows, BATCH):
            predict(values[begin : begin + BATCH])
        best = max(best, rows / (time.perf_counter() - began))
    return best


def identity(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


def peer(framework: Networks, run: str, name: str, batch: int, way: str) -> Any:
    """Return `predict_batch_udf` of the network."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    def make() -> Predict:
        return framework.predictor(run, name, way)

    return predict_batch_udf(
        make,
        return_type=ArrayType(FloatType()),
        batch_size=batch,
        input_tensor_shapes=[[WIDTHS[name]]],
    )


def write_rows(spark: Any, place: Path, width: int, rows: int) -> tuple[str, str]:
    """Write the rows, without and with other columns; return both folders."""
    numbers = f"transform(sequence(1, {width}), i -> float(rand())) as features"
    plain, mixed = str(place / "plain"), str(place / "mixed")
    spark.range(0, rows, 1, 4).selectExpr("id", numbers).write.parquet(plain)
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    frame = spark.read.parquet(plain).selectExpr("*", *OTHERS)
    vector = array_to_vector(F.array(F.col("id").cast("double"), F.lit(1.0)))
    frame.withColumn("vector", vector).write.parquet(mixed)
    return plain, mixed


def contenders(
    framework: Networks, spark: Any, run: str, name: str, plain: str, mixed: str, out: Path
) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    import horovod_spark_runner

    transformer = getattr(horovod_spark_runner, framework.transformer)
    ours = transformer.from_run(run)
    larger = transformer.from_run(run, predict_batch_size=BATCHES[1])
    best, *others = framework.ways
    one, other = spark.read.parquet(plain), spark.read.parquet(mixed)

    def drain(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def spark_files(*columns: str, by: Any = ours) -> None:
        frame = by.transform(spark.read.parquet(plain))
        frame.select(*(columns or ["*"])).write.mode("overwrite").parquet(str(out / "spark"))

    def own_files(columns: list[str] | None = None, by: Any = ours) -> None:
        by.predict_files(plain, out / "own", columns=columns, mode="overwrite")

    def by_peer(batch: int, way: str) -> Callable[[], None]:
        # Made once, so that workers load the model in the turn that does not count.
        udf = peer(framework, run, name, batch, way)

        def turn() -> None:
            # Rows suit it better, too; `transform` takes them by itself.
            spark.conf.set(COLUMNAR, "false")
            try:
                drain(one.withColumn("prediction", udf("features")))
            finally:
                spark.conf.unset(COLUMNAR)

        return turn

    return {
        "floor: identity `mapInArrow`": lambda: drain(one.mapInArrow(identity, one.schema)),
        "`transform`": lambda: drain(ours.transform(one)),
        LARGER: lambda: drain(larger.transform(one)),
        "`transform`, prediction alone": lambda: drain(ours.transform(one).select("prediction")),
        **{f"{peer_of(best)}, by {batch:,}": by_peer(batch, best) for batch in BATCHES},
        **{f"{peer_of(way)}, by {BATCH:,}": by_peer(BATCH, way) for way in others},
        "floor, five other columns": lambda: drain(other.mapInArrow(identity, other.schema)),
        "`transform`, five other columns": lambda: drain(ours.transform(other)),
        SPARK_ALL: spark_files,
        "`predict_files`": own_files,
        SPARK_KEY: lambda: spark_files("id", "prediction"),
        OWN_KEY: lambda: own_files(["id"]),
        SPARK_KEY + BY_LARGER: lambda: spark_files("id", "prediction", by=larger),
        OWN_KEY + BY_LARGER: lambda: own_files(["id"], by=larger),
    }


def peer_of(way: str) -> str:
    """Return what Spark's way is called in tables."""
    return f"`predict_batch_udf`, {way}"


def owner(what: str) -> str:
    """Return whose Python workers a contender runs in, as if it had the session for itself."""
    if what.startswith("floor"):
        return "floor"
    return "peer" if "predict_batch_udf" in what else "ours"


def measure(framework: Networks, run: str, name: str, rows: int) -> dict[str, float]:
    """Return rows per second of each contender, the best of its turns after a first one."""
    spark = make_session(2, "4g")
    pyspark.cloudpickle.register_pickle_by_value(networks)  # which workers cannot import
    place = Path(tempfile.mkdtemp(prefix="hsr-benchmark-"))
    try:
        plain, mixed = write_rows(spark, place, WIDTHS[name], rows)
        best: dict[str, float] = {}
        ways = contenders(framework, spark, run, name, plain, mixed, place)
        for repeat in range(REPEATS + 1):
            for what, way in ways.items():
                # Spark gives each environment workers of its own.
                spark.sparkContext.environment["HSR_BENCHMARK"] = owner(what)
                began = time.perf_counter()
                way()
                rate = rows / (time.perf_counter() - began)
                if repeat:
                    best[what] = max(best.get(what, 0.0), rate)
        return best
    finally:
        spark.stop()
        shutil.rmtree(place)


def goals(name: str, rates: dict[str, float]) -> list[list[str]]:
    """Return the ratios that are to be reached. Pure."""
    floor, own = rates["floor: identity `mapInArrow`"], rates["`transform`"]
    memory = rates["in memory"]
    fastest_peer = max(rate for what, rate in rates.items() if what.startswith(peer_of("")))
    mixed, mixed_floor = (
        rates["`transform`, five other columns"],
        rates["floor, five other columns"],
    )
    files = rates["`predict_files`"]
    key = max(rates[OWN_KEY], rates[OWN_KEY + BY_LARGER])
    rows = [
        goal(
            "`predict_files` / Spark's, all columns",
            files / rates[SPARK_ALL],
            at_least=ALL_GOAL,
        ),
        goal(
            "`predict_files` / Spark's, a key, the better size of each",
            key / max(rates[SPARK_KEY], rates[SPARK_KEY + BY_LARGER]),
            at_least=KEY_GOAL,
        ),
    ]
    if name == MLP:
        return [
            goal("`transform` / floor", own / floor, at_least=0.9),
            goal("the same, five other columns", mixed / mixed_floor, at_least=0.9),
            goal(
                "`transform` / `predict_batch_udf`, the best of each",
                max(own, rates[LARGER]) / fastest_peer,
                at_least=2,
            ),
            *rows,
        ]
    both = 1 / (1 / floor + 1 / memory)
    mixed_both = 1 / (1 / mixed_floor + 1 / memory)
    return [
        goal("`transform` / floor and network after one another", own / both, at_least=0.95),
        goal("the same, five other columns", mixed / mixed_both, at_least=0.95),
        *rows,
        goal("`predict_files` / in memory", key / memory, at_least=0.85),
    ]


def bound(rates: dict[str, float]) -> str:
    """Say how much faster than Spark's way files could be scored at most. Pure."""
    memory = rates["in memory"]
    whole = memory / rates[SPARK_ALL]
    key = memory / max(rates[SPARK_KEY], rates[SPARK_KEY + BY_LARGER])
    beyond = "" if whole >= ALL_GOAL and key >= KEY_GOAL else " A goal beyond that is out of reach."
    return (
        f"If reading and writing cost nothing, `predict_files` would be {whole:.2f} times as fast "
        f"as Spark's way with all columns, and {key:.2f} times with a key: so fast is the network."
        + beyond
    )


def in_process(*arguments: object) -> Any:
    """Run a part of this benchmark in a process of its own; return what it prints as JSON."""
    command = [sys.executable, __file__, "--part", json.dumps(arguments)]
    printed = output_of(command, {**os.environ, "PYSPARK_PYTHON": sys.executable})
    return json.loads(printed.splitlines()[-1])


def be_part(what: str, framework: str, place: str, name: str, rows: int) -> Any:
    chosen = FRAMEWORKS[framework]
    if what == "train":
        return train(chosen, Path(place), name)
    if what == "memory":
        return measure_memory(chosen, place, name, rows)
    return measure(chosen, place, name, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), default="keras")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if arguments.part:
        print(json.dumps(be_part(*arguments.part)))
        return
    sizes = QUICK_ROWS if arguments.quick else ROWS
    parts = [f"Rows per second on all cores, best of {REPEATS}, batches of {BATCH:,}."]
    with tempfile.TemporaryDirectory(prefix="hsr-benchmark-") as folder:
        for name, rows in sizes.items():
            run = f"{folder}/{name}"
            in_process("train", arguments.framework, run, name, 0)
            rates = in_process("spark", arguments.framework, run, name, rows)
            rates["in memory"] = in_process("memory", arguments.framework, run, name, rows)
            title = f"{name.upper()}, {rows:,} rows of {WIDTHS[name]} numbers:"
            cells = [[what, f"{rate:,.0f}"] for what, rate in rates.items()]
            reached = table(GOAL_HEAD, goals(name, rates))
            parts += [title, table(["What", "Rows/s"], cells), reached, bound(rates)]
            print(*parts[-3:], sep="\n\n", flush=True)
    title = "Inference" if arguments.framework == "keras" else "Inference with PyTorch"
    present(title, shown_command(), "\n\n".join(parts), arguments.write)


if __name__ == "__main__":
    main()
