"""Sixteen small trials, two at once: what a search costs beyond the trainings. These under

* optuna in one plain process, a Keras script: one after the other, imports included;
* optuna with a Spark job per trial, two at once, started as TorchDistributor starts: a barrier task
  that starts a Python process, which imports the framework and trains;
* `tune` with two slots, the first search of a Spark session and one after it.

A trial is 8 epochs of 1,437 digits with a validation on 360, of a network with 64 inputs.

Run it with ``python benchmarks/tune.py``; ``--write`` puts the table into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import goal, output_of, present, shown_command, table

GRID: dict[str, list[Any]] = {"rate": [1e-4, 1e-3, 1e-2, 1e-1], "units": [16, 32, 64, 128]}
EPOCHS, BATCH, HELD_OUT = 8, 32, 5
TRIALS, SLOTS = 16, 2
GOAL_SECONDS = ["Seconds", "Measured", "Goal", "Met"]


def build(params: dict[str, Any]) -> Any:
    import keras

    layers = [
        keras.layers.Input((64,)),
        keras.layers.Dense(params["units"], activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.Adam(params["rate"]),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def load() -> tuple[Any, Any, Any]:
    """Return images, digits, and which rows are for validation."""
    import numpy as np
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), digits, np.arange(len(digits)) % HELD_OUT == 0


def fit(params: dict[str, Any], data: tuple[Any, Any, Any]) -> tuple[float, float]:
    """Return the last accuracy of a trial by Keras alone, and the seconds of its ``fit``."""
    images, digits, held_out = data
    model = build(params)
    began = time.monotonic()
    history = model.fit(
        images[~held_out],
        digits[~held_out],
        validation_data=(images[held_out], digits[held_out]),
        epochs=EPOCHS,
        batch_size=BATCH,
        verbose=0,
    )
    return history.history["val_accuracy"][-1], time.monotonic() - began


def suggest(trial: Any) -> dict[str, Any]:
    return {name: trial.suggest_categorical(name, values) for name, values in GRID.items()}


def be_plain() -> None:
    """Be the plain process; print the seconds of every fit."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data, seconds = load(), []

    def objective(trial: optuna.Trial) -> float:
        value, fitting = fit(suggest(trial), data)
        seconds.append(fitting)
        return value

    study = optuna.create_study(sampler=optuna.samplers.GridSampler(GRID), direction="maximize")
    study.optimize(objective, n_trials=TRIALS)
    print(json.dumps(seconds))


def be_trial(params: dict[str, Any]) -> None:
    """Be the process of one trial in a Spark task."""
    print(json.dumps(fit(params, load())))


def session() -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master(f"local[{SLOTS}]").config("spark.ui.enabled", "false")
    found = spark.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    found.sparkContext.setLogLevel("OFF")
    found.sparkContext.parallelize(range(SLOTS), SLOTS).map(str).collect()
    return found


def be_jobs() -> None:
    """Be a driver with a Spark job per trial; print the seconds of the search and every fit."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    context, seconds, script = session().sparkContext, [], __file__

    def run(rows: Iterator[str]) -> Iterator[str]:
        command = [sys.executable, script, "--trial", next(rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        yield done.stdout.splitlines()[-1]

    def objective(trial: optuna.Trial) -> float:
        job = context.parallelize([json.dumps(suggest(trial))], 1).barrier().mapPartitions(run)
        value, fitting = json.loads(job.collect()[0])
        seconds.append(fitting)
        return float(value)

    study = optuna.create_study(sampler=optuna.samplers.GridSampler(GRID), direction="maximize")
    began = time.monotonic()
    study.optimize(objective, n_trials=TRIALS, n_jobs=SLOTS)
    print(json.dumps([time.monotonic() - began, seconds]))


def be_tune() -> None:
    """Be a driver with `tune`, twice; print what `be_jobs` prints of each."""
    from horovod_spark_runner.tune import choice, tune

    spark, (images, digits, held_out) = session(), load()
    rows = [
        (image.tolist(), int(digit), bool(held))
        for image, digit, held in zip(images, digits, held_out, strict=True)
    ]
    frame = spark.createDataFrame(rows, "image array<float>, digit int, held_out boolean")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for search in ("first", "later"):
            began = time.monotonic()
            result = tune(
                frame,
                build,
                {name: choice(*values) for name, values in GRID.items()},
                sampler="grid",
                metric="val_accuracy",
                direction="max",
                max_trials=TRIALS,
                study_dir=Path(folder, search),
                feature_cols=["image"],
                label_cols=["digit"],
                validation="held_out",
                epochs=EPOCHS,
                batch_size=BATCH,
                stream_logs=False,
            )
            seconds = time.monotonic() - began
            assert len(result.trials) == TRIALS
            found.append([seconds, result.trials["fit_seconds"].tolist()])
    print(json.dumps(found))


def measure(*options: str) -> tuple[float, Any]:
    """Return the seconds that a process took, and what it printed last."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    began = time.monotonic()
    printed = output_of([sys.executable, __file__, *options], environment)
    return time.monotonic() - began, json.loads(printed.splitlines()[-1])


def overhead(seconds: float, at_once: int, fitting: float) -> float:
    return seconds / TRIALS * at_once - fitting


def row(what: str, seconds: float, at_once: int, fitting: float) -> list[Any]:
    return [
        what,
        f"{seconds:.1f} s",
        f"{seconds / TRIALS:.2f} s",
        f"{fitting:.2f} s",
        f"{overhead(seconds, at_once, fitting):.2f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--be", choices=["plain", "jobs", "tune"], help=argparse.SUPPRESS)
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trial:
        be_trial(json.loads(arguments.trial))
        return
    if arguments.be:
        {"plain": be_plain, "jobs": be_jobs, "tune": be_tune}[arguments.be]()
        return
    plain_seconds, plain_fits = measure("--be", "plain")
    (first, later), (jobs, jobs_fits) = measure("--be", "tune")[1], measure("--be", "jobs")[1]
    alone, side_by_side = statistics.median(plain_fits), statistics.median(jobs_fits)
    rows = [
        row("optuna in one process, one after the other", plain_seconds, 1, alone),
        row("optuna, a Spark job and a fresh process per trial", jobs, SLOTS, side_by_side),
        row("`tune`, first search of a session", first[0], SLOTS, side_by_side),
        row("`tune`, a later one", later[0], SLOTS, side_by_side),
    ]
    head = ["", "the search", "÷ trials", "Keras' `fit`, median", "overhead of a trial"]
    epochs = " and ".join(f"{statistics.median(fits):.2f} s" for _, fits in (first, later))
    measured = overhead(later[0], SLOTS, side_by_side)
    parts = [
        f"{TRIALS} trials of {EPOCHS} epochs; `tune` and the Spark jobs have two at once, one core "
        "each. Keras' `fit` compiles the step, trains and validates; that of the Spark jobs, two "
        "at once, is what the trials of `tune` are compared with. Those compile the step before "
        f"the first epoch; their epochs, with checkpoints, took {epochs} (medians). The overhead "
        "is the search ÷ trials × trials at once − Keras' `fit`.",
        table(head, rows),
        table(GOAL_SECONDS, [goal("overhead of a trial, later search", measured, at_most=1.0)]),
    ]
    present("Search", shown_command(), "\n\n".join(parts), arguments.write)


if __name__ == "__main__":
    main()
