"""Metrics of torchmetrics over several ranks and tasks are those of one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner import (
    CheckpointOptions,
    ModelError,
    RestartOptions,
    RunDirectoryError,
    TorchModel,
    TorchTransformer,
)
from horovod_spark_runner.engines.torch.metrics import Metrics, Sums
from horovod_spark_runner.testing import Fault, Faults
from horovod_spark_runner.training.trainee import merged_sums
from tests.torch.models import FaultAt, digits_net
from tests.trainings import train

torchmetrics: Any = pytest.importorskip("torchmetrics")

CPU = torch.device("cpu")
CLASSES: dict[str, Any] = {"task": "multiclass", "num_classes": 10}


def some(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    if name in ("Accuracy", "AUROC", "ConfusionMatrix", "F1Score"):
        classes = torch.randint(0, 10, (rows,), generator=draw)
        return torch.randn(rows, 10, generator=draw), classes
    return torch.rand(rows, 1, generator=draw), torch.rand(rows, generator=draw)


class Span(torchmetrics.Metric):
    """From the least output to the most."""

    def __init__(self) -> None:
        super().__init__()
        self.least: torch.Tensor
        self.most: torch.Tensor
        self.add_state("least", torch.tensor(float("inf")), dist_reduce_fx="min")
        self.add_state("most", torch.tensor(-float("inf")), dist_reduce_fx="max")

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.least = torch.minimum(self.least, output.min())
        self.most = torch.maximum(self.most, output.max())

    def compute(self) -> torch.Tensor:
        return self.most - self.least


class Level(torchmetrics.Metric):
    """The mean over the batches of the largest output in each."""

    def __init__(self) -> None:
        super().__init__()
        self.level: torch.Tensor
        self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.level = self.level + (output.max() - self.level) / self._update_count

    def compute(self) -> torch.Tensor:
        return self.level


# By their reductions: sums, all rows, moments, least and most, means.
MADE = {
    "Accuracy": functools.partial(torchmetrics.Accuracy, **CLASSES),
    "ConfusionMatrix": functools.partial(torchmetrics.ConfusionMatrix, **CLASSES),
    "AUROC": functools.partial(torchmetrics.AUROC, **CLASSES),
    "SpearmanCorrCoef": torchmetrics.SpearmanCorrCoef,
    "PearsonCorrCoef": torchmetrics.PearsonCorrCoef,
    "R2Score": torchmetrics.R2Score,
    "Span": Span,
    "Level": Level,
    "PeakSignalNoiseRatio": lambda: torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0),
}


@pytest.mark.parametrize("name", MADE)
def test_parts_of_the_rows_are_merged_by_a_metrics_own_reductions(name: str) -> None:
    outputs, labels = some(name, 60)
    pieces = [(0, 7), (7, 7), (7, 30), (30, 60)]
    fives = [[slice(at, min(at + 5, end)) for at in range(begin, end, 5)] for begin, end in pieces]
    parts = []
    for rows in fives:
        metrics, sums = Metrics({"it": MADE[name]()}, CPU), Sums(CPU)
        for part in rows:
            metrics.update(sums, outputs[part], labels[part])
        parts.append(metrics.states.numpy())
    result = Metrics({"it": MADE[name]()}, CPU)
    (joined,) = merged_sums([[part] for part in parts])
    alone = MADE[name]()
    for part in (part for rows in fives for part in rows):
        alone.update(
            outputs[part].flatten() if outputs.shape[1] == 1 else outputs[part], labels[part]
        )
    expected = alone.compute().tolist()
    for given in (parts, [joined]):
        np.testing.assert_allclose(result.computed(given)["it"], expected, rtol=1e-4)
    # One rank goes on with what three have seen.
    if name == "PearsonCorrCoef":  # whose moments of each rank are stacked
        with pytest.raises(RunDirectoryError, match=r"\b3 ranks.*PearsonCorrCoef"):
            result.states.assign(np.concatenate(parts[:3]))
        return
    result.states.assign(np.concatenate(parts[:3]))
    for part in fives[3]:
        result.update(Sums(CPU), outputs[part], labels[part])
    found = result.computed([result.states.numpy()])["it"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_collections_and_what_cannot_be_merged() -> None:
    both = torchmetrics.MetricCollection(
        [torchmetrics.Accuracy(**CLASSES), torchmetrics.F1Score(**CLASSES)], prefix="my_"
    )
    metrics = Metrics(both, CPU)
    assert metrics.of_objects == ["my_MulticlassAccuracy", "my_MulticlassF1Score"]
    metrics.update(Sums(CPU), *some("Accuracy", 8))
    assert set(metrics.computed([metrics.states.numpy()])) == set(metrics.of_objects)
    with pytest.raises(ModelError, match="MinMaxMetric.*state"):
        Metrics([torchmetrics.MinMaxMetric(torchmetrics.Accuracy(**CLASSES))], CPU)
    with pytest.raises(ModelError, match=r"'a'.*MulticlassAccuracy.*shape"):
        Metrics({"a": torchmetrics.Accuracy(**CLASSES)}, CPU).update(
            Sums(CPU), torch.zeros(3, 4), torch.zeros(3)
        )


def still() -> TorchModel:
    """Return a model that stays as it is, so that every row is seen by the same one."""
    return TorchModel(
        digits_net(),
        "CrossEntropyLoss",
        functools.partial(torch.optim.SGD, lr=1e-30),
        metrics={
            "auroc": torchmetrics.AUROC(**CLASSES),
            "table": torchmetrics.ConfusionMatrix(**CLASSES),
            "accuracy": "accuracy",
        },
    )


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_a_training_and_an_evaluation_tell_what_one_process_does(
    digits_df: Any, tmp_path: Path
) -> None:
    """On three ranks of unequal rows, killed within an epoch, and gone on with on two."""
    rows = digits_df.filter("id < 151").cache()
    held = digits_df.filter("id >= 151 and id < 300")
    faults = Faults((Fault(7, rank=1, kind="kill"),), str(tmp_path / "notes"))
    given: dict[str, Any] = {
        "model_fn": still,
        "validation": held,
        "epochs": 1,
        "checkpoints": CheckpointOptions(every_steps=4, best_metric="val_auroc", best_mode="max"),
    }
    kept = tmp_path / "run" / "checkpoints" / "step-00000004"
    with pytest.raises(Exception, match="rank 1"):
        train(
            rows,
            tmp_path / "run",
            **given,
            num_workers=3,
            batch_size=4,
            callbacks=[FaultAt(faults, kept)],
            restarts=RestartOptions(max_restarts=0),
        )
    run = train(
        rows,
        tmp_path / "run",
        **given,
        num_workers=2,
        batch_size=6,
        callbacks=[FaultAt(faults, kept)],
    )
    (history,) = run.summary.history
    for prefix, frame in (("", rows), ("val_", held)):
        found = {
            name: history[f"{prefix}{name}"] for name in ("auroc", "table", "loss", "accuracy")
        }
        check(found, expected_on(frame))
    check(run.evaluate(held.repartition(3)), expected_on(held))
    metrics = {"auroc": torchmetrics.AUROC(**CLASSES)}
    bare = TorchTransformer.from_run(str(tmp_path / "run"), trusted=True)
    found = bare.evaluate(held.repartition(2), metrics=metrics)
    assert found == {"auroc": pytest.approx(expected_on(held)["auroc"], rel=1e-5)}


def check(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def expected_on(frame: Any) -> dict[str, Any]:
    rows = frame.collect()
    with torch.no_grad():
        outputs = digits_net()(torch.tensor([row["image"] for row in rows]))
    labels = torch.tensor([row["digit"] for row in rows])
    metrics = {
        "auroc": torchmetrics.AUROC(**CLASSES),
        "table": torchmetrics.ConfusionMatrix(**CLASSES),
    }
    return {
        **{name: one(outputs, labels).tolist() for name, one in metrics.items()},
        "loss": float(nn.functional.cross_entropy(outputs, labels)),
        "accuracy": float((outputs.argmax(1) == labels).double().mean()),
    }
