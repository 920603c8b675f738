"""How long it takes from the call to a trained model, small data: 1,797 digits, 12 epochs.

* a plain Keras script in one process, its imports included, as the measure;
* `run_training` on two ranks, in a Spark session that is there already: the first call of the
  session, the calls after it, and the first ``transform``;
* where the time of these calls went, phase by phase;
* with ``--restart``: a rank is killed; the time until its successors have done their first step.

Run it with ``python benchmarks/first_result.py``; ``--write`` puts the tables into
``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import output_of, present, shown_command, table

from horovod_spark_runner import CheckpointOptions, RestartOptions

PLAIN = """
import keras
from sklearn.datasets import load_digits
images, digits = load_digits(return_X_y=True)
model = keras.Sequential([
    keras.Input((64,)),
    keras.layers.Dense(64, activation="relu"),
    keras.layers.Dense(10, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit((images / 16).astype("float32"), digits, epochs=12, batch_size=64, verbose=0)
"""
PHASES = ["prepare", "materialize", "check", "tasks", "rendezvous", "start", "function", "results"]
PHASES += ["load", "total"]


def digits_model() -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def measure_plain() -> float:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "2"}
    began = time.monotonic()
    output_of([sys.executable, "-c", PLAIN], environment)
    return time.monotonic() - began


def killers(folder: str) -> list[Any]:
    """Return a callback that kills rank 1 after step 100, once, and notes the times."""
    import horovod.tensorflow as hvd
    import keras

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            killed, again = Path(folder, "killed"), Path(folder, "again")
            if hvd.rank() != 1 or again.exists():
                return
            if killed.exists():
                again.write_text(str(time.time()))
            elif int(self.model.optimizer.iterations) == 100:
                killed.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    return [Kill()]


def be_spark(calls: int, restarts: int) -> None:
    """Be the process with the Spark session; print what it measured as JSON."""
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    import horovod_spark_runner

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = spark.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    images, digits = load_digits(return_X_y=True)
    rows = [
        ([float(value) / 16 for value in image], int(digit))
        for image, digit in zip(images, digits, strict=True)
    ]
    frame = spark.createDataFrame(rows, "features array<float>, label long")
    frame.count()

    def train(**options: Any) -> Any:
        return horovod_spark_runner.run_training(
            frame,
            digits_model,
            feature_cols=["features"],
            label_cols=["label"],
            num_workers=2,
            epochs=12,
            batch_size=32,
            stream_logs=False,
            **options,
        )

    seconds, timings, transforms, again = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for call in range(calls):
            began = time.monotonic()
            model = train(run_dir=f"{folder}/run-{call}")
            seconds.append(time.monotonic() - began)
            timings.append(model.summary.timings)
            began = time.monotonic()
            model.transform(frame).select("prediction").collect()
            transforms.append(time.monotonic() - began)
        for restart in range(restarts):
            place = Path(folder, f"restart-{restart}")
            place.mkdir()
            train(
                run_dir=f"{folder}/restarted-{restart}",
                callbacks=functools.partial(killers, str(place)),
                restarts=RestartOptions(max_restarts=1),
                checkpoints=CheckpointOptions(every_steps=20),
            )
            moments = [float((place / name).read_text()) for name in ("killed", "again")]
            again.append(moments[1] - moments[0])
    print(
        json.dumps(
            {"seconds": seconds, "timings": timings, "transforms": transforms, "again": again}
        )
    )


def measure_spark(calls: int, restarts: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--spark", str(calls), str(restarts)]
    printed = output_of(command, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="sessions (3)")
    parser.add_argument("--calls", type=int, default=4, help="calls per session (4)")
    parser.add_argument("--restarts", type=int, default=2, help="killed ranks per session (2)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--spark", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.spark:
        be_spark(*arguments.spark)
        return
    plain, found = [], []
    for _ in range(arguments.rounds):
        plain.append(measure_plain())
        found.append(measure_spark(arguments.calls, arguments.restarts))
        print(plain[-1], found[-1]["seconds"], found[-1]["again"], flush=True)
    times = {
        "plain Keras script, one process": plain,
        "`run_training`, first of a session": [answer["seconds"][0] for answer in found],
        "`run_training`, later": [s for answer in found for s in answer["seconds"][1:]],
        "first `transform`": [answer["transforms"][0] for answer in found],
    }
    limit = statistics.median(plain)
    rows = []
    for what, seconds in times.items():
        median = statistics.median(seconds)
        rows.append([what, f"{median:.2f} s", f"{median / limit:.2f}", len(seconds)])
    phases = []
    for title, chosen in (("first", slice(0, 1)), ("later", slice(1, None))):
        timings = [t for answer in found for t in answer["timings"][chosen]]
        cells = [f"{statistics.median(t[phase] for t in timings):.2f}" for phase in PHASES]
        phases.append([title, *cells, len(timings)])
    parts = [
        "1,797 digits, 12 epochs, two ranks on this machine; medians.",
        table(["what", "time", "÷ plain", "n"], rows),
        "Where the time of these calls went, in seconds:",
        table(["call", *PHASES, "n"], phases),
    ]
    again = [seconds for answer in found for seconds in answer["again"]]
    if again:
        parts.append(
            f"From the SIGKILL of a rank to the first step after the restart: median "
            f"{statistics.median(again):.2f} s, {min(again):.2f} to {max(again):.2f} s "
            f"(n = {len(again)}), of which {RestartOptions().backoff_seconds:g} s is the pause "
            "before a restart (`backoff_seconds`)."
        )
    present("First result", shown_command(), "\n\n".join(parts), arguments.write)


if __name__ == "__main__":
    main()
