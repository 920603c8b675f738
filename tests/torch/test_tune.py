"""A search over PyTorch modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import TorchModel, TorchTransformer
from horovod_spark_runner.tune import choice, tune
from tests.mpi import tune_cases

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]


def build(params: dict[str, Any]) -> TorchModel:
    import torch
    from torch import nn

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, params["units"]), nn.Tanh(), nn.Linear(params["units"], 1))
    return TorchModel(module, loss="MSELoss", optimizer=torch.optim.SGD(module.parameters(), 0.1))


def test_a_search_trains_modules(spark: Any, tmp_path: Path) -> None:
    rows = spark.createDataFrame(tune_cases.ROWS, tune_cases.SCHEMA).coalesce(1)
    result = tune(
        rows,
        build,
        {"units": choice(2, 4)},
        sampler="grid",
        validation="held_out",
        epochs=2,
        max_trials=2,
        parallel=1,
        stream_logs=False,
        study_dir=tmp_path / "study",
    )
    assert sorted(result.trials["params.units"]) == [2, 4]
    assert isinstance(result.best_transformer, TorchTransformer)
    assert result.best_transformer.getModel()[0].out_features == result.best_params["units"]
    held_out = result.best_transformer.transform(rows.filter("held_out"))
    error = held_out.selectExpr("avg(power(prediction - label, 2))").first()[0]
    assert error == pytest.approx(result.best_value, rel=1e-5)
