"""Train a classifier or regressor on a table of numbers; a job for ``spark-submit``.

    spark-submit --master MASTER --properties-file conf/standalone-gpu.conf \\
        examples/train_submit.py --data hdfs:///flights.parquet --features dep_time,distance \\
        --label arr_delay --num-workers 8 --gpus-per-worker 1 --run-dir hdfs:///runs/flights

Without ``--data`` it trains on scikit-learn's 1,797 handwritten digits.
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

from horovod_spark_runner import LaunchOptions, run_training

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def make_model(classes: int, learning_rate: float) -> Any:
    """Return a compiled network for rows of any length; called on every worker.

    Args:
        classes: classes of the label; 0 for a label that is a number.
        learning_rate: of Adam.
    """
    import keras

    model = keras.Sequential(
        [
            keras.layers.BatchNormalization(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(classes or 1, activation="softmax" if classes else None),
        ]
    )
    optimizer = keras.optimizers.Adam(learning_rate)
    if classes:
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    else:
        model.compile(optimizer, "mean_squared_error", metrics=["mean_absolute_error"])
    return model


def load_digits(spark: SparkSession) -> DataFrame:
    """Return the digits: ``features`` (64 numbers from 0 to 1) and ``label``."""
    from sklearn.datasets import load_digits as load

    data = load()
    rows = [
        ((image / 16.0).ravel().tolist(), int(digit))
        for image, digit in zip(data.images, data.target, strict=True)
    ]
    return spark.createDataFrame(rows, "features array<float>, label int")


def load_table(spark: SparkSession, path: str, columns: list[str], label: str) -> DataFrame:
    """Return the table at ``path`` as ``features`` (a vector) and ``label``.

    Args:
        spark: the session.
        path: a Parquet folder, or CSV files with a header if it ends in ``.csv`` or ``.csv.gz``.
        columns: feature columns; all but the label if there are none.
        label: label column.
    """
    from pyspark.ml.feature import VectorAssembler

    if path.endswith((".csv", ".csv.gz")):
        table = spark.read.csv(path, header=True, inferSchema=True)
    else:
        table = spark.read.parquet(path)
    columns = columns or [name for name in table.columns if name != label]
    table = table.select(*columns, label).dropna()
    assembled = VectorAssembler(inputCols=columns, outputCol="features").transform(table)
    return assembled.selectExpr("features", f"`{label}` as label")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on a table of numbers with spark-submit.")
    parser.add_argument("--data", help="Parquet folder or CSV file (handwritten digits)")
    parser.add_argument("--features", default="", help="columns, separated by commas (all)")
    parser.add_argument("--label", default="label", help="label column (label)")
    parser.add_argument("--classes", type=int, help="classes of the label; 0 to fit a number")
    parser.add_argument("--num-workers", type=int, default=2, help="ranks (2)")
    parser.add_argument("--gpus-per-worker", type=int, default=0, help="GPUs of a rank (0)")
    parser.add_argument("--share-gpus", action="store_true", help="allow ranks to share a GPU")
    parser.add_argument(
        "--start-timeout", type=float, help="seconds to wait for executors (as long as they start)"
    )
    parser.add_argument("--epochs", type=int, default=5, help="epochs (5)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per rank and step (32)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam (0.001)")
    parser.add_argument("--run-dir", required=True, help="where checkpoints and model go")
    arguments = parser.parse_args()
    if arguments.classes is None:
        arguments.classes = 0 if arguments.data else 10
    return arguments


def main() -> None:
    from pyspark.sql import SparkSession

    arguments = parse_arguments()
    spark = SparkSession.builder.appName("train_submit").getOrCreate()
    if arguments.data:
        columns = [name for name in arguments.features.split(",") if name]
        df = load_table(spark, arguments.data, columns, arguments.label)
    else:
        df = load_digits(spark)
    model = run_training(
        df,
        functools.partial(make_model, arguments.classes, arguments.learning_rate),
        feature_cols=["features"],
        label_cols=["label"],
        num_workers=arguments.num_workers,
        gpus_per_worker=arguments.gpus_per_worker,
        launch=LaunchOptions(
            share_gpus=arguments.share_gpus, start_timeout=arguments.start_timeout
        ),
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation=0.1,
        run_dir=arguments.run_dir,
    )
    for rank in model.summary.placement:
        print(
            f"rank {rank.rank}: {rank.host}, {'GPU ' + ','.join(rank.gpus) if rank.gpus else 'CPU'}"
        )
    for number, metrics in enumerate(model.summary.history, start=1):
        print(f"epoch {number}: {', '.join(f'{k} {v:.4f}' for k, v in metrics.items())}")
    print(f"run directory: {model.summary.run_dir}")
    spark.stop()


if __name__ == "__main__":
    main()
