"""Train on the master given, in a process of its own, and print the outcome as JSON.

Usage: job.py MASTER RUN_DIR [search] [REQUEST ...] [KEY=VALUE ...]; MASTER is a Spark master, or
``connect:`` and the remote of a Spark Connect server, and a REQUEST what `function_job` answers.
With ``search``, two trials are searched, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from function_job import answer
from sessions import make_session

from horovod_spark_runner import HorovodRunner, run_training
from horovod_spark_runner.tune import choice, tune

ROOT = str(Path(__file__).parents[2])


def model_fn() -> Any:
    return model_of({"rate": 0.01})


def model_of(params: dict[str, Any]) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(params["rate"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
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


def search(frame: Any, study_dir: str) -> dict[str, Any]:
    """Return what became of two trials, and what their best model predicts."""
    found = tune(
        frame,
        model_of,
        {"rate": choice(1e-4, 1e-2)},
        sampler="grid",
        max_trials=3,
        study_dir=study_dir,
        feature_cols=["image"],
        label_cols=["digit"],
        validation=0.2,
        stream_logs=False,
    )
    predicted = found.best_transformer.transform(frame.limit(5)).select("prediction").collect()
    return {
        "states": found.trials["state"].tolist(),
        "best": found.best_params,
        "predicted": len(predicted),
        "study": sorted(os.listdir(study_dir)),
    }


def main() -> None:
    master, run_dir, *given = sys.argv[1:]
    settings = [text for text in given if "=" in text and not text.startswith("{")]
    spark = make_session(master, ["spark.driver.host=127.0.0.1", *settings], "ERROR")
    places = HorovodRunner(2).run(where).results
    answers = [answer(text, spark) for text in given if text.startswith("{")]

    sys.path.insert(0, ROOT)  # of the driver only: the ranks need nothing of the tests
    from tests.digits import load as load_digits

    images, digits = load_digits()
    rows = list(zip(images.tolist(), digits.tolist(), strict=True))
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
    found = search(frame, f"{run_dir}-study") if "search" in given else None
    spark.stop()
    result = {"places": places, "history": model.summary.history, "accuracy": accuracy}
    print(json.dumps({**result, "search": found, "answers": answers}))


if __name__ == "__main__":
    main()
