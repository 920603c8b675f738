"""Train on pods and print the outcome as JSON, in a process of its own or for spark-submit.

Usage: job.py '{"run_dir": …, "num_workers": 2, …}' [KEY=VALUE ...]: arguments of `run_training`,
and settings of Spark. ``"seconds"`` is how long an epoch takes at least.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pyspark.sql import SparkSession

from horovod_spark_runner import HorovodSparkError, LaunchOptions, RestartPolicy, run_training


def make_model() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mean_squared_error")
    return model


def main() -> None:
    text, *settings = sys.argv[1:]
    arguments = json.loads(text)
    builder = SparkSession.builder.appName("kubernetes test")
    for setting in ["spark.ui.enabled=false", *settings]:
        key, _, value = setting.partition("=")
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = [([i / 100, (i % 7) / 7], i / 50 - (i % 7) / 7) for i in range(200)]
    frame = spark.createDataFrame(rows, "x array<float>, y float")
    launch = LaunchOptions(start_timeout=arguments.pop("start_timeout", 60))
    if restarts := arguments.pop("restarts", 0):
        arguments["restart"] = RestartPolicy(restarts)
    callbacks = []
    if seconds := arguments.pop("seconds", 0):
        import keras

        class Slow(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                print(f"epoch {epoch} is over", flush=True)
                time.sleep(seconds)

        callbacks = [Slow()]
    try:
        model = run_training(
            frame,
            make_model,
            feature_cols=["x"],
            label_cols=["y"],
            launch=launch,
            batch_size=10,
            callbacks=callbacks,
            **arguments,
        )
    except HorovodSparkError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        spark.stop()
        return
    predicted = model.transform(frame).selectExpr("avg(abs(prediction[0] - y)) as error").first()
    summary = model.summary
    outcome = {
        "losses": [metrics["loss"] for metrics in summary.history],
        "hosts": [rank.host for rank in summary.placement],
        "gpus": [list(rank.gpus) for rank in summary.placement],
        "error": predicted.error,
    }
    spark.stop()
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
