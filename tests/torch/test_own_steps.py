"""Steps of the user's own: what they may do to gradients, and what is refused by name."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner import ModelError, TorchModel
from horovod_spark_runner.engines.torch.custom_step import CustomStepGradients
from tests.torch.models import flat_weights
from tests.torch.test_equals_one_process import batches, recorded
from tests.trainings import train

GLOBAL_BATCH = 24
# Seconds that a slow rank is late by, twice in a step.
LATE = 0.05
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


Move = Callable[[Any, Callable[[int, int], Any]], Any]


def clipped(step: Any, loss: Callable[[int, int], Any]) -> Any:
    step.optimizer.zero_grad()
    value = loss(0, step.rows)
    value.backward()
    step.synchronize()
    nn.utils.clip_grad_norm_(step.module.parameters(), 0.1)
    step.optimizer.step()
    return value


def in_parts(step: Any, loss: Callable[[int, int], Any]) -> Any:
    step.optimizer.zero_grad()
    values = [loss(0, step.rows // 2), loss(step.rows // 2, step.rows)]
    for value in values:
        value.backward()
    step.optimizer.step()
    return sum(values)


def twice(step: Any, loss: Callable[[int, int], Any]) -> Any:
    for _ in range(2):
        step.optimizer.zero_grad()
        value = loss(0, step.rows)
        value.backward()
        step.optimizer.step()
    return value


def clipped_alone(step: Any, loss: Callable[[int, int], Any]) -> Any:
    value = loss(0, step.rows)
    value.backward()
    nn.utils.clip_grad_norm_(step.module.parameters(), 0.1)
    step.optimizer.step()
    return value


def accumulated(step: Any, loss: Callable[[int, int], Any]) -> Any:
    value = loss(0, step.rows)
    value.backward()
    return value


def late(step: Any, loss: Callable[[int, int], Any]) -> Any:
    value = loss(0, step.rows)
    value.backward()
    step.synchronize(step.optimizer)
    loss(0, step.rows).backward()
    step.optimizer.step()
    return value


def each_row(step: Any, loss: Callable[[int, int], Any]) -> Any:
    twice(step, loss)
    return torch.zeros(step.rows)


def moved(move: Move) -> TorchModel:
    def train_step(step: Any) -> dict[str, Any]:
        (image,), (digit,) = step.inputs, step.labels

        def loss(begin: int, end: int) -> Any:
            found = step.module(image[begin:end])
            values = nn.functional.cross_entropy(found, digit[begin:end].long(), reduction="sum")
            return values / len(image)

        return {"own": move(step, loss)}

    return TorchModel(net(), train_step=train_step, optimizer=SGD)


class Alone:
    """A `TorchStep` of plain PyTorch."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer

    def synchronize(self) -> None:
        """Nobody else has gradients."""


def plain(run: Path, move: Move) -> np.ndarray:
    model = moved(move)
    module: Any = model.module
    step: Any = Alone(module, SGD(module.parameters()))
    for batch in batches(run):
        step.inputs, step.labels, step.rows = (
            [batch["image"]],
            [batch["digit"]],
            len(batch["digit"]),
        )
        assert model.train_step is not None
        model.train_step(step)
    return flat_weights(module)


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter("id < 115").cache()


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.parametrize("move", [clipped, in_parts, twice])
def test_what_a_step_does_with_gradients_is_done_with_those_of_all_ranks(
    frame: Any, tmp_path: Path, move: Move
) -> None:
    weights, _ = recorded(frame, tmp_path, lambda: moved(move), 2)
    expected = plain(tmp_path / "run", move)
    for ours in weights:
        np.testing.assert_allclose(ours[-1], expected, rtol=0, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.parametrize(
    ("move", "ranks", "message"),
    [
        (
            clipped_alone,
            2,
            r"backward\(\).*step\.synchronize\(\)",
        ),
        (accumulated, 1, "ended.*gradients.*optimizer"),
        (late, 2, r"backward pass.*synchronize\(\)"),
        (each_row, 1, r"train_step.*'own'.*\(24,\)"),
    ],
)
def test_what_would_be_done_with_those_of_one_rank_is_refused(
    frame: Any, tmp_path: Path, move: Move, ranks: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        recorded(frame, tmp_path, lambda: moved(move), ranks)


def slow_on_the_second_rank() -> TorchModel:
    def late() -> None:
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(LATE)

    def train_step(step: Any) -> dict[str, Any]:
        (image,), (digit,) = step.inputs, step.labels
        step.optimizer.zero_grad()
        late()
        loss: Any = nn.functional.cross_entropy(step.module(image), digit.long())
        loss.backward()
        late()
        step.optimizer.step()
        return {"own": loss}

    module = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    return TorchModel(module, train_step=train_step, optimizer=SGD, sync_batch_norm=True)


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_waiting_for_a_slow_rank_is_no_computing(digits_df: Any, tmp_path: Path) -> None:
    """Neither in layers that add up over ranks, nor where ranks agree on who steps next."""
    rows, run = 2 * 12 * 20, tmp_path / "run"
    train(
        digits_df.filter(f"id < {rows}"), run, model_fn=slow_on_the_second_rank, batch_size=12,
        epochs=1,
    )  # fmt: skip
    (line,) = (run / "metrics.jsonl").read_text().splitlines()
    seconds = json.loads(line)["accounting"]["seconds"]
    slept = 19 * 2 * LATE  # the first step is an account of its own
    assert seconds["compute"][1] > slept
    assert seconds["compute"][0] < 0.25 * slept
    assert seconds["exchange"][0] > 0.9 * slept


def test_one_rank_may_clip_as_it_likes() -> None:
    module = nn.Linear(2, 1)
    optimizer = SGD(module.parameters())
    gradients = CustomStepGradients({"": optimizer}, 1)
    gradients.begin()
    module(torch.ones(3, 2)).sum().backward()
    nn.utils.clip_grad_value_(module.parameters(), 0.1)
    assert gradients.stepping(optimizer)
    gradients.end()


def clamped(parameter: Any) -> None:
    parameter.grad = parameter.grad.clamp(-0.1, 0.1)


def halved(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("change", [clamped, halved])
@pytest.mark.parametrize("more", [True, False])
def test_gradients_that_are_changed_or_replaced_are_found_out(change: Any, more: bool) -> None:
    """Also where another backward pass adds to them."""
    module = nn.Linear(2, 1)
    optimizer = SGD(module.parameters())
    gradients = CustomStepGradients({"": optimizer}, 2)
    gradients.begin()
    module(torch.ones(3, 2)).sum().backward()
    change(module.weight)
    if more:
        module(torch.ones(3, 2)).sum().backward()
    message = r"backward\(\).*step\(\).*step\.synchronize\(\)"
    with pytest.raises(ModelError, match=message):
        gradients.stepping(optimizer)


def test_what_all_ranks_have_may_be_stepped_with_again() -> None:
    module = nn.Linear(2, 1)
    optimizer = SGD(module.parameters())
    gradients = CustomStepGradients({"": optimizer}, 2)
    gradients.begin()
    module(torch.ones(3, 2)).sum().backward()
    for parameter in module.parameters():  # cleared in place, and computed anew
        parameter.grad.zero_()  # type: ignore[union-attr]
    module(torch.ones(3, 2)).sum().backward()
    assert gradients.stepping(optimizer)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)  # as the exchange gives them
    assert gradients.stepping(optimizer)
    gradients.end()


class InPlace(torch.autograd.Function):
    """Gives a gradient in memory that another one has had, changed once as a sum of two is."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, memory: np.ndarray) -> torch.Tensor:
        ctx.memory = memory
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(ctx.memory).add_(1.0), None


def test_a_new_gradient_may_lie_where_the_last_one_was() -> None:
    weight, memory = nn.Parameter(torch.ones(8)), np.zeros(8, np.float32)
    optimizer = SGD([weight])
    gradients = CustomStepGradients({"": optimizer}, 2)
    for _ in range(2):
        gradients.begin()
        optimizer.zero_grad()
        loss: Any = InPlace.apply(weight, memory)  # type: ignore[no-untyped-call]
        loss.backward()
        assert gradients.stepping(optimizer)
        weight.grad = torch.from_numpy(memory)  # as the exchange gives it
        gradients.end()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_another_network_leaves_are_cleared_or_refused(to_none: bool) -> None:
    """As a generator has them while only its judge steps."""
    judge, generator = nn.Linear(1, 1), nn.Linear(2, 1)
    optimizers = {"judge": SGD(judge.parameters()), "generator": SGD(generator.parameters())}
    gradients = CustomStepGradients(optimizers, 2)

    def judged() -> None:
        gradients.begin()
        optimizers["judge"].zero_grad(set_to_none=to_none)
        judge(generator(torch.ones(3, 2))).sum().backward()
        assert gradients.stepping(optimizers["judge"])
        gradients.end()

    def generated() -> None:
        judge(generator(torch.ones(3, 2))).sum().backward()
        assert gradients.stepping(optimizers["generator"])

    for _ in range(3):
        judged()
        gradients.begin()
        optimizers["generator"].zero_grad(set_to_none=to_none)
        generated()
        gradients.end()
    judged()
    gradients.begin()
    with pytest.raises(ModelError, match="'generator'.*gradients"):
        generated()
