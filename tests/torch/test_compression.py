"""Gradients of PyTorch modules that are compressed between ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner import (
    Allreduce,
    CheckpointOptions,
    DataOptions,
    ModelError,
    PowerSGD,
    RestartOptions,
    Threshold,
    TopK,
    TorchModel,
)
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.testing import Fault, Faults
from tests.compression import GradientCompression
from tests.runs import assert_same_weights
from tests.torch.models import FaultAt, adversaries, digits_net, flat_weights
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

# Four global batches of 24 rows and one row more: in an epoch's last step, one rank alone has any.
GLOBAL_BATCH, ROWS, EPOCHS = 24, 97, 2
RATIO, MOMENTUM, RATE = 0.05, 0.6, 0.1
WEIGHTS = torch.linspace(0.2, 3.0, 10)


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter(f"id < {ROWS}")


def weighted_model() -> TorchModel:
    """Return a network whose loss divides by weights of classes, not by rows."""
    sgd = functools.partial(torch.optim.SGD, lr=RATE)
    return TorchModel(digits_net(), nn.CrossEntropyLoss(weight=WEIGHTS), sgd)


def run(frame: Any, place: Path, compression: Any, model: Any, **given: Any) -> Any:
    arguments: dict[str, Any] = {
        "model_fn": model,
        "batch_size": GLOBAL_BATCH // 2,
        "epochs": EPOCHS,
        "data": DataOptions(keep_data=True),
        "sync": Allreduce(compression=compression),
    }
    return train(frame, place, **{**arguments, **given})


def expected_weights(place: Path, ranks: int) -> np.ndarray:
    """Train with PyTorch alone, on what the ranks of a run saw and what the paper makes of it."""
    manifest = Manifest.from_json(next(place.glob("data/data-*/manifest.json")).read_text())
    module = digits_net()
    parameters = list(module.parameters())[::-1]  # as they are sent
    reference = GradientCompression([RATIO] * 99, MOMENTUM)
    for epoch in range(EPOCHS):
        plan = plan_epoch(
            [(group.rows, group.size) for group in manifest.row_groups],
            global_batch=GLOBAL_BATCH,
            seed=0,
            epoch=epoch,
            window_bytes=256 * 1024 * 1024,
        )
        parts = [DatasetReader(manifest).epoch(plan, rank, ranks) for rank in range(ranks)]
        for batches in zip(*parts, strict=True):
            labels = [torch.from_numpy(b.arrays["digit"].copy()).long() for b in batches]
            divisor = sum(float(WEIGHTS[label].sum()) for label in labels)
            terms = []
            for batch, label in zip(batches, labels, strict=True):
                module.zero_grad()
                output = module(torch.from_numpy(batch.arrays["image"].copy()))
                losses: Any = nn.functional.cross_entropy(
                    output, label, weight=WEIGHTS, reduction="sum"
                )
                (losses / divisor).backward()
                terms.append([np.array(p.grad.numpy()) for p in parameters if p.grad is not None])
            with torch.no_grad():
                for parameter, total in zip(parameters, reference.step(terms), strict=True):
                    parameter.sub_(RATE * torch.from_numpy(total))
    return flat_weights(module)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_what_the_paper_says(frame: Any, tmp_path: Path, ranks: int) -> None:
    way = TopK(ratio=RATIO, momentum=MOMENTUM)
    given = {"num_workers": ranks, "batch_size": GLOBAL_BATCH // ranks}
    trained = run(frame, tmp_path, way, weighted_model, **given)
    expected = expected_weights(tmp_path, ranks)
    np.testing.assert_allclose(flat_weights(trained.getModel()), expected, rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_all_entries_of_two_optimizers_are_plain_allreduce(frame: Any, tmp_path: Path) -> None:
    given = {"label_cols": None}
    plain = run(frame, tmp_path / "plain", "none", adversaries, **given)
    run(frame, tmp_path / "all", TopK(ratio=1.0), adversaries, **given)
    assert_same_weights(tmp_path / "all", tmp_path / "plain", atol=1e-6)
    part = run(frame, tmp_path / "part", Threshold(start=1e-3), adversaries, **given)
    assert part.summary.traffic["bytes_sent"] < plain.summary.traffic["bytes_sent"] / 3


def in_buckets() -> TorchModel:
    """Return a network whose gradients leave in two buckets, with clipping and Adam."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(64, 1200), nn.ReLU(), nn.Linear(1200, 900), nn.Linear(900, 10))
    adam = functools.partial(torch.optim.Adam, lr=0.002)
    return TorchModel(module, "CrossEntropyLoss", adam, metrics=["accuracy"], clip_norm=1.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way", [PowerSGD(rank=2), TopK(ratio=0.01, warmup_steps=3)], ids=["power_sgd", "top_k"]
)
def test_a_run_that_was_killed_ends_as_it_would_have(frame: Any, tmp_path: Path, way: Any) -> None:
    faults = Faults((Fault(6, rank=1),), str(tmp_path / "notes"))
    given = {"checkpoints": CheckpointOptions(every_steps=2)}
    kept = tmp_path / "run" / "checkpoints" / "step-00000004"
    struck = run(
        frame,
        tmp_path / "run",
        way,
        in_buckets,
        callbacks=[FaultAt(faults, kept)],
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
        **given,
    )
    whole = run(frame, tmp_path / "whole", way, in_buckets, **given)
    assert len(struck.summary.attempts) == 2
    assert struck.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.thorough
def test_momentum_twice_is_refused(frame: Any, tmp_path: Path) -> None:
    def model() -> TorchModel:
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return TorchModel(digits_net(), "CrossEntropyLoss", sgd)

    with pytest.raises(ModelError, match="SGD.*momentum"):
        run(frame, tmp_path, TopK(ratio=0.1, momentum=0.9), model)
