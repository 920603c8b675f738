"""Find the network that reads handwritten digits best, trying several at once on a local Spark.

Run it with ``python examples/tune_digits.py``; run it again with the same ``--study-dir`` and more
``--trials`` to go on. It needs the extra ``tune`` (optuna).
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from horovod_spark_runner.tune import choice, integer, loguniform, tune

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPACE = {
    "rate": loguniform(1e-4, 1e-1),
    "units": integer(8, 128, log=True),
    "activation": choice("relu", "tanh"),
    "batch_size": choice(16, 32, 64),
}


def make_model(params: dict[str, Any]) -> Any:
    """Return the compiled network of a trial; called on every worker."""
    import keras

    layers = [
        keras.layers.Input((64,)),
        keras.layers.Dense(params["units"], activation=params["activation"]),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.Adam(params["rate"]),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def load_digits(spark: SparkSession) -> DataFrame:
    """Return scikit-learn's digits: ``image`` (64 numbers from 0 to 1) and ``digit``."""
    from sklearn.datasets import load_digits as load

    data = load()
    rows = [
        ((image / 16.0).ravel().tolist(), int(digit))
        for image, digit in zip(data.images, data.target, strict=True)
    ]
    return spark.createDataFrame(rows, "image array<float>, digit int")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Search for a network that reads digits.")
    parser.add_argument("--trials", type=int, default=16, help="trials of the study (16)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of a trial (8)")
    parser.add_argument("--study-dir", default=None, help="the study (studies/<time>)")
    parser.add_argument("--master", default="local[2]", help="Spark master (local[2])")
    return parser.parse_args()


def main() -> None:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    arguments = parse_arguments()
    builder = SparkSession.builder.master(arguments.master).appName("tune_digits")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.log.level", "ERROR").getOrCreate()
    train, test = load_digits(spark).randomSplit([0.8, 0.2], seed=7)
    began = time.monotonic()
    found = tune(
        train,
        make_model,
        SPACE,
        metric="val_accuracy",
        direction="max",
        max_trials=arguments.trials,
        pruner="median",
        study_dir=arguments.study_dir,
        feature_cols=["image"],
        label_cols=["digit"],
        validation=0.2,
        epochs=arguments.epochs,
    )
    seconds = time.monotonic() - began
    columns = ["trial", "state", "value", *(f"params.{name}" for name in SPACE), "epochs"]
    print(found.trials.sort_values("value", ascending=False)[columns].to_string(index=False))
    print(f"\nBest: trial {found.best_trial}, {found.best_params}")
    best = F.expr("cast(array_position(prediction, array_max(prediction)) - 1 as int)")
    right = found.best_transformer.transform(test).select(
        F.avg((best == F.col("digit")).cast("int"))
    )
    print(f"Its accuracy on the test images: {right.first()[0]:.3f}")
    print(f"{len(found.trials)} trials in {seconds:.1f} s; study: {found.study_dir}")
    spark.stop()


if __name__ == "__main__":
    main()
