"""Train a small convolutional network on real images, on two ranks of a local Spark.

The images are scikit-learn's 1,797 handwritten digits of 8×8 pixels. Run it with
``./scripts/demo``, or ``python examples/digits.py --workers 2``.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from horovod_spark_runner import DataOptions, run_training

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def make_model() -> Any:
    """Return the compiled network; called on every worker."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def load_digits(spark: SparkSession) -> DataFrame:
    """Return the digits: ``image`` (64 numbers from 0 to 1) and ``digit``."""
    from sklearn.datasets import load_digits as load

    data = load()
    rows = [
        ((image / 16.0).ravel().tolist(), int(digit))
        for image, digit in zip(data.images, data.target, strict=True)
    ]
    return spark.createDataFrame(rows, "image array<float>, digit int")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a CNN on handwritten digits.")
    parser.add_argument("--workers", type=int, default=2, help="ranks (2)")
    parser.add_argument("--epochs", type=int, default=12, help="epochs (12)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per rank and step (32)")
    parser.add_argument("--run-dir", default=None, help="run directory (runs/<time>)")
    parser.add_argument("--master", default=None, help="Spark master (local[WORKERS])")
    return parser.parse_args()


def make_session(master: str) -> SparkSession:
    """Return a Spark session that leaves the terminal to the training's own progress."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("digits")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    return builder.config("spark.log.level", "ERROR").getOrCreate()


def main() -> None:
    from pyspark.sql import functions as F

    arguments = parse_arguments()
    spark = make_session(arguments.master or f"local[{arguments.workers}]")
    train, test = load_digits(spark).randomSplit([0.8, 0.2], seed=7)
    began = time.monotonic()
    model = run_training(
        train,
        make_model,
        feature_cols=["image"],
        label_cols=["digit"],
        data=DataOptions(shapes={"image": (8, 8, 1)}),
        num_workers=arguments.workers,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        run_dir=arguments.run_dir,
        seed=1,
    )
    seconds = time.monotonic() - began

    best = F.expr("cast(array_position(prediction, array_max(prediction)) - 1 as int)")
    predicted = model.transform(test).withColumn("predicted", best).cache()
    correct, count = predicted.agg(
        F.count_if(F.col("predicted") == F.col("digit")), F.count("*")
    ).first()
    print(f"\nHeld-out accuracy: {correct / count:.3f} ({correct} of {count} test images)")
    print("Placement:")
    for rank in model.summary.placement:
        print(f"  rank {rank.rank} on {rank.host}, GPUs: {', '.join(rank.gpus) or 'none'}")
    timings = model.summary.timings
    rate = timings["samples_per_second"]
    print(f"Throughput: {rate:,.0f} images/s in {timings['train']:.1f} s of training steps")
    print(f"Whole run_training call: {seconds:.1f} s")
    print(f"Run directory: {model.summary.run_dir}\n")
    print("Some predictions, made by Spark:")
    confidence = F.round(F.array_max("prediction"), 3).alias("confidence")
    predicted.select("digit", "predicted", confidence).show(8)
    spark.stop()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt as interrupt:  # which tells where the run stands
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(130)
