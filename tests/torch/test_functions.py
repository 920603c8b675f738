"""Losses and metrics of the user's own, and accuracy: what they compare, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import ModelError
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.torch.binding import BatchBinding
from horovod_spark_runner.engines.torch.losses import Losses
from horovod_spark_runner.engines.torch.metrics import Metrics, Sums
from horovod_spark_runner.training.spec import Binding
from tests.runs import spec_of

CPU = torch.device("cpu")
DRAW = torch.Generator().manual_seed(1)
OUTPUT, LABEL = torch.randn(9, 1, generator=DRAW), torch.randn(9, generator=DRAW)


def loss_of(given: Any, output: Tensor, label: Tensor, weights: Tensor | None = None) -> float:
    losses = Losses(given, Binding(("y",)))
    (term,) = losses.terms(output, [label], [output], weights)
    return float(term.summed) / float(term.count)


def metric_of(given: Any, output: Tensor, label: Tensor, loss: Any = None) -> float:
    metrics, sums = Metrics({"it": given}, CPU, loss), Sums(CPU)
    metrics.update(sums, output, label)
    return sums.results()["it"]


SQUARES = [
    lambda o, y: (o - y).square(),
    lambda o, y: (o - y).square().mean(),
    lambda o, y: (o - y).square().mean(1),
    nn.functional.mse_loss,
    nn.functional.l1_loss,
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("function", SQUARES)
def test_a_function_that_compares_each_row_with_all_labels_is_refused(function: Any) -> None:
    message = r"'.*'.*labels.*\(9, 1\).*\(9,\)"
    with pytest.raises(ModelError, match=message):
        loss_of(function, OUTPUT, LABEL)
    with pytest.raises(ModelError, match=message):
        metric_of(function, OUTPUT, LABEL)


@pytest.mark.parametrize(
    "function",
    [
        lambda o, y: (o - y.view_as(o)).square(),
        lambda o, y: (o.squeeze(1) - y).square().mean(),
        # What is of the whole batch is nobody's mistake.
        lambda o, y: (o.max() - y.max()).abs(),
    ],
)
def test_functions_that_compare_rows_with_their_labels(function: Any) -> None:
    expected = float(function(OUTPUT, LABEL).mean())
    assert loss_of(function, OUTPUT, LABEL) == pytest.approx(expected)
    assert metric_of(function, OUTPUT, LABEL) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((torch.tensor([3.0]), 4), 0.75),
        ((np.float32(3.0), np.int64(4)), 0.75),
        (np.float32(0.5), 0.5),
        (torch.tensor([[0.5]]), 0.5),
        (True, 1.0),
    ],
)
def test_numbers_of_any_kind_are_metrics(value: Any, expected: float) -> None:
    assert metric_of(lambda o, y: value, OUTPUT, LABEL) == expected


@pytest.mark.parametrize(
    "value", [(OUTPUT, LABEL), (1.0, None), "0.5", LABEL[:4], torch.tensor([])]
)
def test_what_is_no_metric_is_named(value: Any) -> None:
    with pytest.raises(ModelError, match=r"'it'.*\b9 rows"):
        metric_of(lambda o, y: value, OUTPUT, LABEL)


def test_hinge_loss_compares_row_by_row() -> None:
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    expected = float(nn.functional.hinge_embedding_loss(OUTPUT[:, 0], signs))
    assert loss_of("HingeEmbeddingLoss", OUTPUT, signs) == pytest.approx(expected)


def test_weights_of_classes_and_of_rows() -> None:
    scores, classes = torch.randn(7, 4, generator=DRAW), torch.tensor([0, 1, 2, 3, 3, 1, 0])
    balance, heavy = torch.tensor([1.0, 2.0, 0.5, 3.0]), torch.arange(7.0)
    each = nn.functional.cross_entropy(scores, classes, balance, reduction="none")
    expected = float((each * heavy).sum() / balance[classes].sum())
    loss = nn.CrossEntropyLoss(balance)
    assert loss_of(loss, scores, classes, heavy) == pytest.approx(expected)


def test_accuracy_is_told_by_the_loss() -> None:
    scores = torch.eye(4)
    classes = torch.tensor([0, 1, 3, -100])
    assert metric_of("accuracy", scores, classes, "CrossEntropyLoss") == pytest.approx(2 / 3)
    ignoring = nn.CrossEntropyLoss(ignore_index=0)
    assert metric_of("accuracy", scores, torch.tensor([0, 1, 3, 3]), ignoring) == pytest.approx(
        2 / 3
    )
    truth = torch.tensor([1.0, 0.0, 1.0, 1.0])
    logits = torch.tensor([[0.3], [-0.1], [-2.0], [4.0]])
    assert metric_of("accuracy", logits, truth, "BCEWithLogitsLoss") == 0.75
    assert metric_of("accuracy", logits.sigmoid(), truth, nn.BCELoss()) == 0.75
    assert metric_of("accuracy", torch.full((4, 1), 0.3), truth, "BCELoss") == 0.25
    with pytest.raises(ModelError, match="row.*loss"):
        metric_of("accuracy", logits, truth, "MSELoss")
    assert metric_of("accuracy", scores, scores.roll(1, 0), "CrossEntropyLoss") == 0.0
    assert metric_of("accuracy", scores, scores, "MSELoss") == 1.0
    for loss in ("MultiLabelSoftMarginLoss", "MSELoss"):
        with pytest.raises(ModelError, match=f"'accuracy'.*{loss}"):
            metric_of("accuracy", scores, torch.ones(4, 4), loss)


@pytest.mark.parametrize(
    ("column", "module", "message"),
    [
        (Column("x", "int32", (3,)), nn.Linear(3, 1), r"\bx\b.*int32.*float32"),
        (Column("x", "float32", (3,)), nn.Linear(3, 1).double(), r"dtypes=\{'x': 'float64'\}"),
        (Column("x", "float32"), nn.Linear(1, 4), r"\bx\b.*\(2,\).*x\[:, None\]"),
        (
            Column("x", "float32", (3,)),
            nn.Linear(2, 4),
            r"\bx\b.*\(2, 3\)(?!.*x\[:).*PyTorch",
        ),
    ],
)
def test_columns_of_another_type_or_shape_than_the_weights(
    column: Column, module: nn.Module, message: str
) -> None:
    batches = BatchBinding(module, spec_of([column]), CPU)
    batch = batches.of(
        {"x": column.blank().repeat(2, 0), "y": np.zeros(2, np.float32)}, training=False
    )
    with pytest.raises(ModelError, match=message):
        batches.call(module, batch)
