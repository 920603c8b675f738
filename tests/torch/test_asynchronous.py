"""PyTorch modules whose ranks step by themselves: `AsyncServer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import AsyncServer, CheckpointOptions, TorchModel
from tests.trainings import train

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

# Of 12 global batches both ranks have rows, of the last one only one has.
ROWS, BATCH, PARTS, EPOCHS = 193, 8, 25, 2


class Counting(nn.Module):
    """A weight that becomes larger by 1 in every step, whatever the rows; and a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.count = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        told: Tensor = self.count + 0 * self.norm(x).mean(1)
        return told


def label(output: Tensor, target: Tensor) -> Tensor:
    return target.float().mean()


def model() -> TorchModel:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 1.0)

    def up(output: Tensor, target: Tensor) -> Tensor:
        return -output.mean()

    return TorchModel(Counting(), up, sgd, metrics={"label": label})


def test_no_update_of_a_module_is_lost(digits_df: Any, tmp_path: Path) -> None:
    frame = digits_df.filter(f"id < {ROWS - 1}")
    run = train(
        frame,
        tmp_path,
        model_fn=model,
        batch_size=BATCH,
        epochs=EPOCHS,
        sync=AsyncServer(staleness=2),
        checkpoints=CheckpointOptions(every_steps=5),
    )
    module = run.getModel()
    parts = EPOCHS * (PARTS - 1)
    assert module.count.item() == parts
    late = run.summary.staleness
    assert sum(late) == parts
    assert len(late) <= 2 + 1 + 1
    # Both count about half of the batches; what they have gathered of them becomes one mean.
    assert 0 < int(module.norm.num_batches_tracked) <= parts
    assert module.norm.running_mean.abs().max() > 0
    labels = [row.digit for row in frame.select("digit").collect()]
    for logs in run.summary.history:
        assert logs["label"] == pytest.approx(sum(labels) / len(labels), rel=1e-6)
