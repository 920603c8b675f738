"""Run by a test: a saved pipeline is loaded and used, and a module trained, without TensorFlow."""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession

from horovod_spark_runner import TorchModel, TorchTransformer, run_training

FRAMEWORKS = ("tensorflow", "keras", "torch")


def telling() -> Any:
    """Return a module that tells whether its process has imported TensorFlow."""
    import torch

    class Telling(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.full((len(x),), "tensorflow" in sys.modules or "keras" in sys.modules)

    return Telling()


def make_model() -> TorchModel:
    """Return a module, where TensorFlow cannot be imported."""
    import torch

    try:
        import tensorflow
    except ModuleNotFoundError:
        return TorchModel(torch.nn.Linear(3, 1), "MSELoss", "Adam")
    raise AssertionError(f"{tensorflow} is there")


def main() -> None:
    source, target, run_dir = sys.argv[1:]
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    with TorchTransformer.loading(trusted=True):
        model = PipelineModel.load(source)
    before = [name for name in FRAMEWORKS if name in sys.modules]
    frame = spark.createDataFrame([([1.0, 2.0, 3.0], 4)], "x array<float>, n int").coalesce(1)
    predicted = model.transform(frame).first().p
    model.write().overwrite().save(target)
    with TorchTransformer.loading(trusted=True):
        again = PipelineModel.load(target).transform(frame).first().p
    trained = run_training(
        frame.selectExpr("explode(sequence(1, 32)) AS i", "x", "n"),
        make_model,
        feature_cols=["x"],
        label_cols=["n"],
        num_workers=2,
        batch_size=4,
        epochs=1,
        run_dir=run_dir,
        stream_logs=False,
    )
    trained.write().overwrite().save(target)
    own = (
        TorchTransformer.read().modelFn(make_model).load(target).transform(frame).first().prediction
    )
    driver = [name for name in FRAMEWORKS if name in sys.modules]
    import torch

    asked = TorchTransformer.from_module(telling(), ["x"], example=torch.zeros(1, 3))
    found = {
        "predicted": [predicted, again],
        "before": before,
        "driver": driver,
        "in worker": asked.transform(frame).first().prediction,
        "loss": model.stages[-1].summary.history[0]["loss"],
        "trained": list(trained.summary.history[0]),
        "its prediction": isinstance(own, float),
    }
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
