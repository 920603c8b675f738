"""What the tests of searches train; as a program, a search that kills itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from horovod_spark_runner.tune import TuneResult, loguniform, tune

_RANDOM = np.random.default_rng(0)
_FEATURES = _RANDOM.normal(size=(200, 3)).round(3)
SCHEMA = "features array<float>, label float, held_out boolean"
ROWS = [
    (values.tolist(), float(values @ [1.0, -2.0, 0.5]), number % 5 == 0)
    for number, values in enumerate(_FEATURES)
]


def build(params: dict[str, Any]) -> Any:
    import keras

    layers = [keras.layers.Input((3,)), keras.layers.Dense(params["units"], "tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(params["lr"]), "mse")
    return model


def slow_when_long(params: dict[str, Any]) -> Any:
    return build({"units": 2, **params})


def callbacks() -> list[Any]:
    """Return one that takes its time in every epoch but the first two."""
    import time

    import keras

    class Slow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            time.sleep(0.3 if self.params["epochs"] > 2 else 0.0)

    return [Slow()]


def search(rows: Any, study: Path, pruner: Any = None) -> TuneResult:
    return tune(
        rows,
        slow_when_long,
        {"lr": loguniform(1e-3, 1e-1)},
        validation="held_out",
        epochs=3,
        max_trials=3,
        parallel=1,
        pruner=pruner,
        stream_logs=False,
        study_dir=study,
    )


def search_and_die(study: Path) -> None:
    """Search, and kill this process after two epochs of the second trial."""
    import optuna
    from pyspark.sql import SparkSession

    class Kill(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            if trial.number == 1 and max(trial.intermediate_values) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return False

    spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
    rows = spark.getOrCreate().createDataFrame(ROWS, SCHEMA).repartition(2)
    search(rows, study, Kill())


if __name__ == "__main__":
    search_and_die(Path(sys.argv[1]))
