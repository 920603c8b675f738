"""Trains on the master given, in a process of its own; prints what became of it as JSON.

Usage: job.py MASTER RUN_DIR [KEY=VALUE ...]; MASTER is a Spark master, or ``connect:`` and the
remote of a Spark Connect server.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from sessions import make_session

from horovod_spark_runner import HorovodRunner, run_training


def model_fn() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def where() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    hvd.init()
    return {
        "rank": hvd.rank(),
        "local_rank": hvd.local_rank(),
        "size": hvd.size(),
        "executor": os.getcwd(),
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
    }


def main() -> None:
    master, run_dir, *settings = sys.argv[1:]
    spark = make_session(master, ["spark.driver.host=127.0.0.1", *settings], "ERROR")
    places = HorovodRunner(2).run(where).results

    from sklearn.datasets import load_digits

    data = load_digits()
    rows = [
        ((i / 16).ravel().tolist(), int(t)) for i, t in zip(data.images, data.target, strict=True)
    ]
    frame = spark.createDataFrame(rows, "image array<float>, digit int")
    model = run_training(
        frame,
        model_fn,
        feature_cols=["image"],
        label_cols=["digit"],
        num_workers=2,
        epochs=2,
        run_dir=run_dir,
    )
    predicted = model.transform(frame).selectExpr(
        "avg(cast(array_position(prediction, array_max(prediction)) - 1 = digit as int)) as right"
    )
    accuracy = predicted.first().right
    spark.stop()
    print(json.dumps({"places": places, "history": model.summary.history, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
