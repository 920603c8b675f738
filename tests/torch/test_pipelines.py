"""A pipeline with a PyTorch module leaves Spark: as a bundle, and as one ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.feature import VectorAssembler
from torch import nn

from horovod_spark_runner import ModelError, TorchTransformer, export_pipeline
from horovod_spark_runner.scoring import load_pipeline
from horovod_spark_runner.scoring.onnx_session import OnnxSession

pytestmark = pytest.mark.spark


def test_a_module_in_a_pipeline_is_scored_by_onnxruntime(spark: Any, tmp_path: Path) -> None:
    rows = [(n * 0.5, n % 3) for n in range(8)]
    frame = spark.createDataFrame(rows, "x double, n int").coalesce(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 3), nn.Softmax(1))
    transformer = TorchTransformer.from_module(module, ["v"], example=torch.zeros(1, 2))
    assembler = VectorAssembler(inputCols=["x", "n"], outputCol="v")
    fitted = PipelineModel([assembler, transformer])
    expected = np.array([row["prediction"] for row in fitted.transform(frame).collect()])
    place = tmp_path / "bundle"
    with pytest.raises(ModelError, match="'saved_model' can be made .*network='onnx'"):
        export_pipeline(fitted, place, frame)
    export_pipeline(fitted, place, frame, network="onnx")
    given: dict[str, Any] = {"x": [x for x, _ in rows], "n": [n for _, n in rows]}
    found = load_pipeline(place).score(given)["prediction"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    export_pipeline(fitted, tmp_path / "p.onnx", frame, format="onnx")
    arrays = {"x": np.array(given["x"]), "n": np.array(given["n"], np.int32)}
    made = OnnxSession((tmp_path / "p.onnx").read_bytes())(arrays)
    assert made["row_state"].tolist() == [0] * len(rows)
    np.testing.assert_allclose(made["prediction"], expected, rtol=0, atol=1e-6)
