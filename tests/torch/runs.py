"""Runs of PyTorch modules without a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.torch.artifact import save_model
from horovod_spark_runner.engines.torch.binding import match_inputs
from horovod_spark_runner.training.trained_model import ModelInputs

from ..runs import spec_of


def save_run(place: Path, module: nn.Module, columns: Sequence[Column], **fields: Any) -> None:
    """Leave ``module`` in a run directory as a training does."""
    directory = RunDirectory(str(place))
    spec = spec_of(columns, **fields)
    feed = match_inputs(module, spec.inputs, {column.name: column for column in columns})
    save_model(directory, module, ModelInputs.of_training(spec), feed)
    directory.write_metrics([{"loss": 1.0}])
