"""Run by a test: a saved pipeline is loaded, used and saved again where only the package is."""

from __future__ import annotations

import json
import sys

from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import SparkSession

from horovod_spark_runner import HorovodEstimator

FRAMEWORKS = ("tensorflow", "keras", "torch")


def main() -> None:
    kind, source, target = sys.argv[1:]
    builder = SparkSession.builder.config("spark.ui.enabled", "false")
    if kind == "connect":
        builder = builder.remote("local[1]")
    else:
        builder = builder.master("local[1]").config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
    spark = builder.getOrCreate()
    model = PipelineModel.load(source)
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    frame = spark.createDataFrame([([1.0, 2.0, 3.0], 4)], "x array<float>, n int")
    predicted = model.transform(frame).first().p
    model.write().overwrite().save(target)
    model.write().overwrite().save(target)
    again = PipelineModel.load(target).transform(frame).first().p
    stage = model.stages[-1]
    estimator = HorovodEstimator(modelFn="no.such:model", epochs=3, data={"allow_nan": True})
    for _ in range(2):
        Pipeline(stages=[estimator]).write().overwrite().save(f"{target}-estimator")
    (kept,) = Pipeline.load(f"{target}-estimator").getStages()
    found = {
        "predicted": [predicted, again],
        "loaded": loaded,
        "uid": stage.uid,
        "estimator": [kept.getModelFn(), kept.getEpochs(), kept.getData()],
        "loss": stage.summary.history[0]["loss"],
    }
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
