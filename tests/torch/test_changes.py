"""What a PyTorch run that goes on is asked for otherwise: kept, warned of, or refused by name."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import TorchModel
from horovod_spark_runner.engines.torch.optimizers import (
    Schedulers,
    make_optimizers,
)
from horovod_spark_runner.engines.torch.state import compare_models, describe_model


def described(loss: Any = "MSELoss", rate: float = 0.1, **given: Any) -> Any:
    """Return what a checkpoint says of a model once it was read again."""
    net = nn.Linear(2, 1)
    sgd = functools.partial(torch.optim.SGD, lr=rate)
    model = TorchModel(net, loss, sgd, **given)
    optimizers = make_optimizers(model, net)
    schedulers = Schedulers(model, optimizers)
    return json.loads(json.dumps(describe_model(model, net, optimizers, schedulers)))


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("scheduler", [None, decay])
def test_another_learning_rate_is_warned_of_each_time(scheduler: Any) -> None:
    then = described(rate=0.1, scheduler=scheduler)
    asked = described(rate=0.2, scheduler=scheduler)
    changes = compare_models(then, asked, in_epoch=True)
    (text,) = changes.warnings
    assert re.search("lr.*SGD.*0.2.*0.1", text)
    again = compare_models(changes.record, asked, in_epoch=True)
    assert (again.refusal, again.warnings) == (None, changes.warnings)
    assert compare_models(changes.record, then, in_epoch=True).warnings == ()


class Focal(nn.Module):
    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return ((output - label).abs() ** self.gamma).mean(1)


def scaled(output: Tensor, label: Tensor, by: float) -> Tensor:
    return by * (output - label).abs().mean(1)


@pytest.mark.parametrize(
    ("then", "now", "shown"),
    [
        ({}, {"loss": nn.MSELoss(reduction="sum")}, "MSELoss(reduction='sum')"),
        ({}, {"loss": nn.L1Loss()}, "L1Loss(reduction='mean')"),
        ({"loss": Focal(1.0)}, {"loss": Focal(2.0)}, "Focal(gamma=2)"),
        (
            {"loss": functools.partial(scaled, by=1.0)},
            {"loss": functools.partial(scaled, by=2.0)},
            "scaled(by=2)",
        ),
        (
            {"loss": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))},
            {"loss": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))},
            "BCEWithLogitsLoss(reduction='mean', pos_weight=[3.0])",
        ),
        ({}, {"train_step": scaled}, "'scaled'"),
        ({"metrics": ["mae"]}, {"metrics": {"mae": scaled}}, "{'mae': 'scaled'}"),
    ],
)
def test_another_loss_step_or_metric(then: Any, now: Any, shown: str) -> None:
    kept, asked = described(**then), described(**now)
    within = compare_models(kept, asked, in_epoch=True).refusal
    assert within is not None
    (setting,) = now
    wanted = f"{setting}.*{re.escape(shown)}"
    assert re.search(f"{wanted}.*checkpoint.*epoch", within), within
    between = compare_models(kept, asked, in_epoch=False)
    assert between.refusal is None
    assert len(between.warnings) == ("metrics" not in now)
    for text in between.warnings:
        assert re.search(wanted, text), text
        assert "new" in text, text
    # Once told, it is the run's own.
    again = compare_models(between.record, asked, in_epoch=True)
    assert (again.refusal, again.warnings) == (None, ())


def test_what_is_the_same_is_not_told() -> None:
    def here(output: Tensor, label: Tensor) -> Tensor:
        return (output - label).mean(1)

    first = here

    def elsewhere() -> Any:
        def here(output: Tensor, label: Tensor) -> Tensor:
            return (output - label).mean(1)

        return here

    for then, now in [("MSELoss", nn.MSELoss()), (first, elsewhere()), (Focal(1.0), Focal(1.0))]:
        changes = compare_models(described(then), described(now), in_epoch=True)
        assert (changes.refusal, changes.warnings) == (None, ())
    # What is no part of the sums may change at any step.
    clipped = compare_models(described(), described(clip_norm=1.0), in_epoch=True)
    (text,) = clipped.warnings
    assert re.search(r"clip_norm.*\b1\b.*None", text)


def test_checkpoints_that_say_nothing_of_the_model_are_gone_on_with() -> None:
    now = described()
    changes = compare_models({}, now, in_epoch=True)
    assert (changes.refusal, changes.warnings, changes.record) == (None, (), now)
