"""PyTorch modules whose ranks train alone between meetings, against modules of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner import DataOptions, DiLoCo, LocalSGD, TorchModel
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from tests.torch.models import digits_model, flat_weights
from tests.trainings import train

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

# Four global batches of 24 rows and one row more: in an epoch's last step, rank 1 has none.
GLOBAL_BATCH, ROWS, EPOCHS, STEPS = 24, 97, 2, 5


def two_modules(run: Path, every: int, outer: tuple[float, float] | None) -> np.ndarray:
    """Train two modules on what the ranks of a run saw, meeting as they do; return the weights."""
    manifest = Manifest.from_json(next(run.glob("data/data-*/manifest.json")).read_text())
    given: list[Any] = [digits_model(), digits_model()]
    modules = [model.module for model in given]
    optimizers = [model.optimizer(model.module.parameters()) for model in given]
    before = flat_weights(modules[0])
    velocity = np.zeros_like(before)
    for epoch in range(EPOCHS):
        plan = plan_epoch(
            [(group.rows, group.size) for group in manifest.row_groups],
            global_batch=GLOBAL_BATCH,
            seed=0,
            epoch=epoch,
            window_bytes=256 * 1024 * 1024,
        )
        parts = [DatasetReader(manifest).epoch(plan, rank, 2) for rank in range(2)]
        rows = [0, 0]
        for number, batches in enumerate(zip(*parts, strict=True)):
            for rank, batch in enumerate(batches):
                if batch.rows:
                    optimizers[rank].zero_grad()
                    output = modules[rank](torch.from_numpy(batch.arrays["image"].copy()))
                    label = torch.from_numpy(batch.arrays["digit"].copy()).long()
                    loss: Any = nn.functional.cross_entropy(output, label)
                    loss.backward()
                    optimizers[rank].step()
                    rows[rank] += batch.rows
            if (epoch * STEPS + number + 1) % every and number + 1 < STEPS:
                continue
            shares = np.array(rows) / sum(rows)
            mean = sum(s * flat_weights(m) for s, m in zip(shares, modules, strict=True))
            step = mean - before
            if outer is not None:
                velocity = outer[1] * velocity + step
                step = outer[0] * (step + outer[1] * velocity)
            before = before + step
            for module in modules:
                nn.utils.vector_to_parameters(
                    torch.from_numpy(before.astype(np.float32)), module.parameters()
                )
            rows = [0, 0]
    return before


def test_batches_are_counted_where_ranks_have_no_rows(digits_df: Any, tmp_path: Path) -> None:
    def model() -> TorchModel:
        torch.manual_seed(3)
        image = nn.Unflatten(1, (1, 8, 8)), nn.BatchNorm2d(1), nn.Flatten()
        module = nn.Sequential(*image, nn.Linear(64, 10))
        return TorchModel(module, nn.CrossEntropyLoss(), torch.optim.Adam)

    trained = train(
        digits_df.filter(f"id < {ROWS}"),
        tmp_path,
        model_fn=model,
        batch_size=GLOBAL_BATCH // 2,
        epochs=EPOCHS,
        sync=LocalSGD(every=3),
    )
    assert trained.getModel().state_dict()["1.num_batches_tracked"] == EPOCHS * STEPS


@pytest.mark.parametrize(
    ("way", "outer"),
    [(LocalSGD(every=3), None), (DiLoCo(every=2, outer_lr=0.5, outer_momentum=0.8), (0.5, 0.8))],
    ids=["local_sgd", "diloco"],
)
def test_ranks_that_train_alone_are_so_many_modules(
    digits_df: Any, tmp_path: Path, way: Any, outer: tuple[float, float] | None
) -> None:
    rows = digits_df.filter(f"id < {ROWS}")
    trained = train(
        # Two labels of three are ignored, that of a rank's only row among them.
        rows.selectExpr("image", "if(id % 3 = 0, digit, -100) as digit"),
        tmp_path,
        model_fn=digits_model,
        batch_size=GLOBAL_BATCH // 2,
        epochs=EPOCHS,
        data=DataOptions(keep_data=True),
        sync=way,
    )
    expected = two_modules(tmp_path, way.every, outer)
    np.testing.assert_allclose(flat_weights(trained.getModel()), expected, rtol=0, atol=2e-5)
