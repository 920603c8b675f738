"""What the exchange of a PyTorch module's gradients asks of the way of synchronising."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from horovod_spark_runner import ModelError, PowerSGD, Threshold, TopK, TorchModel
from horovod_spark_runner.engines.torch.custom_step import CustomSteps
from horovod_spark_runner.engines.torch.exchange import GradientExchange, TensorCollectives
from horovod_spark_runner.sync.compressed import CompressedSynchroniser
from horovod_spark_runner.sync.mpi import MpiWire
from tests.torch.models import digits_net
from tests.torch.test_equals_one_process import recorded

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Branches(nn.Module):
    """One of two layers is used, and a third never is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(2, 1), nn.Linear(2, 3), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, one: bool) -> torch.Tensor:
        used: torch.Tensor = (self.one if one else self.two)(x)
        return used


def alone(way: Any, module: nn.Module) -> tuple[GradientExchange, CompressedSynchroniser, Any]:
    hvd.init()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
    sync = CompressedSynchroniser(way, TensorCollectives(), MpiWire())
    return GradientExchange([optimizer], sync, 1, torch.device("cpu")), sync, optimizer


@pytest.mark.parametrize("way", ["bf16", TopK(ratio=0.1), Threshold(), PowerSGD()], ids=str)
@pytest.mark.parametrize("usual", [True, False])
def test_parameters_that_a_step_does_not_use_are_no_others(way: Any, usual: bool) -> None:
    module = Branches()
    exchange, _, optimizer = alone(way, module)
    for one in (True, False, True):
        with exchange.step(None, (False, True)):
            optimizer.zero_grad(set_to_none=True)
            with exchange.backward():
                module(torch.ones(3, 2), one).sum().backward()
            expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            if usual:
                exchange.exchange()
            else:
                exchange.of(optimizer)
        found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        # What has none keeps none: with zeros, weight decay would act on it.
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)
        assert exchange.counts == [0.0, 1.0]


def test_one_rank_goes_on_with_what_several_have_kept() -> None:
    module = Branches()
    exchange, sync, optimizer = alone(TopK(ratio=0.1), module)
    kept = np.arange(1, 16, dtype=np.float32)
    sync.restore({"sum/residual/0": kept})
    with exchange.step(None, ()):
        optimizer.zero_grad(set_to_none=True)
        with exchange.backward():
            module(torch.zeros(3, 2), True).sum().backward()
        own = {p: 0.0 if p.grad is None else p.grad.numpy() for p in module.parameters()}
        exchange.exchange()
    begin = 0
    for parameter in reversed(list(module.parameters())):  # as they lie in a bucket
        part = kept[begin : begin + parameter.numel()].reshape(parameter.shape)
        begin += parameter.numel()
        assert parameter.grad is not None
        np.testing.assert_array_equal(parameter.grad.numpy(), part + own[parameter])


def train_step(step: Any) -> None:
    def closure() -> Any:
        step.optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(step.outputs(), step.labels[0].long())
        loss.backward()
        return loss

    step.optimizer.step(closure)


def of_closures(**given: Any) -> TorchModel:
    torch.manual_seed(3)
    return TorchModel(digits_net(), train_step=train_step, optimizer=SGD, **given)


@pytest.mark.parametrize(
    ("way", "given", "refused"),
    [("bf16", {}, False), ("bf16", {"clip_norm": 1.0}, True), (TopK(ratio=0.1), {}, True)],
    ids=["plain", "clipped", "top_k"],
)
def test_closures_are_refused_on_one_rank_where_they_come_too_late(
    way: Any, given: dict[str, Any], refused: bool
) -> None:
    model = of_closures(**given)
    module: Any = model.module
    optimizer = SGD(module.parameters())
    sync = CompressedSynchroniser(way, TensorCollectives(), MpiWire())
    no: Any = None  # of what computes
    alone, cpu = MPI.COMM_WORLD, torch.device("cpu")
    CustomSteps(model, module, {"": optimizer}, no, no, sync, alone, cpu)
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(module(torch.eye(64)), torch.arange(64) % 10)
        loss.backward()
        losses.append(loss.item())
        return loss

    if refused:
        for given in ({}, {"closure": closure}):
            with pytest.raises(ModelError, match="closure.*backward.*step"):
                optimizer.step(*[] if given else [closure], **given)
        assert not losses
    else:
        for _ in range(2):
            optimizer.step(closure)
        assert losses[-1] < losses[0]


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_closures_are_refused_where_ranks_step_together(digits_df: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="closure.*backward.*step"):
        recorded(digits_df.limit(64), tmp_path, of_closures, 2)
