"""PyTorch modules in Spark ML's searches, and pipelines that leave Spark as ONNX."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from torch import nn

from horovod_spark_runner import (
    DataError,
    HorovodEstimator,
    TorchModel,
    TorchTransformer,
    export_pipeline,
)
from horovod_spark_runner.training.onnx import OnnxSession

pytestmark = [pytest.mark.thorough, pytest.mark.spark]


def line(rate: float) -> TorchModel:
    torch.manual_seed(0)
    return TorchModel(nn.Linear(2, 1), "MSELoss", functools.partial(torch.optim.SGD, lr=rate))


@pytest.mark.mpi
def test_a_search_over_folds(spark: Any, tmp_path: Path) -> None:
    rows = [([n / 32, n % 3 / 3], n / 16 - n % 3 / 3, n % 2) for n in range(32)]
    frame = spark.createDataFrame(rows, "features array<float>, label float, fold int").coalesce(1)
    estimator = HorovodEstimator(
        modelFn=line, numWorkers=1, batchSize=4, epochs=4, runDir=str(tmp_path / "runs")
    )
    still, good = {"rate": 1e-30}, {"rate": 0.3}
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.modelArgs, [still, good]).build(),
        evaluator=RegressionEvaluator(metricName="mse"),
        numFolds=2,
        foldCol="fold",
        parallelism=2,
    )
    found = search.fit(frame)
    wanted = np.array([row[1] for row in rows], np.float32)
    with torch.no_grad():
        module: Any = line(1.0).module
        start = module(torch.tensor([row[0] for row in rows]))[:, 0]
    assert found.avgMetrics[0] == pytest.approx(np.square(start.numpy() - wanted).mean(), rel=1e-4)
    assert found.avgMetrics[1] < found.avgMetrics[0] / 2
    assert isinstance(found.bestModel, TorchTransformer)
    found.write().save(str(tmp_path / "search"))
    with TorchTransformer.loading(trusted=True):
        loaded = CrossValidatorModel.load(str(tmp_path / "search"))
    told = [model.transform(frame).select("prediction").collect() for model in (found, loaded)]
    assert told[0] == told[1]


class Heads(nn.Module):
    """Gives scores, and probabilities that are rounded: their sums are not quite 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 3))
        self.of_n, self.of_pair = nn.Embedding(3, 2), nn.Embedding(4, 2)

    def forward(
        self, v: torch.Tensor, n: torch.Tensor, pair: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        scores = self.net(v + self.of_n(n) + self.of_pair(pair[:, 1]))
        return {"scores": scores, "shares": scores.softmax(1).bfloat16()}


def test_a_module_in_a_pipeline_is_scored_by_onnxruntime(spark: Any, tmp_path: Path) -> None:
    rows = [(n * 0.05, n % 3, [-5, n % 4]) for n in range(24)]
    schema = "x double, n int, pair array<int>"
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    torch.manual_seed(0)
    example = (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2).int())
    transformer = TorchTransformer.from_module(Heads(), ["v", "n", "pair"], example=example)
    transformer.setPredictionCol({"scores": "prediction", "shares": "kind"})
    transformer.setProbabilityCol({"shares": "p"})
    assembler = VectorAssembler(inputCols=["x", "n"], outputCol="v")
    fitted = PipelineModel([assembler, transformer])
    predicted = fitted.transform(frame).collect()
    expected = np.array([row["prediction"] for row in predicted])
    shares = np.array([row["p"].toArray() for row in predicted])
    assert (abs(shares.sum(axis=1) - 1) > 1e-3).any()
    kinds = [row["kind"] for row in predicted]
    export_pipeline(fitted, tmp_path / "p.onnx", frame)
    given: dict[str, Any] = dict(zip(("x", "n", "pair"), zip(*rows, strict=True), strict=True))
    arrays = {
        "x": np.array(given["x"]),
        "n": np.array(given["n"], np.int32),
        "pair": np.array(given["pair"], float),
    }
    session = OnnxSession((tmp_path / "p.onnx").read_bytes())
    made = session(arrays)
    assert made["row_state"].tolist() == [0] * len(rows)
    np.testing.assert_allclose(made["prediction"], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(made["p"], shares, rtol=0, atol=4e-3)
    assert made["kind"].tolist() == kinds
    # What an embedding does not have, beyond its table: an error, as in PyTorch.
    for n, index in ((3, 0), (0, 4)):
        row: dict[str, Any] = {"x": np.zeros(1), "n": np.array([n], np.int32)}
        row["pair"] = np.array([[0.0, index]])
        with pytest.raises(DataError, match=r"row.*index.*beyond"):
            session(row)
