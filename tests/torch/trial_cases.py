"""Cases of tried steps, run by test_trial.py: a process that has not gone through a backward pass.

Each trial is made in forks of it, as in the side process of a rank.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import TorchModel
from horovod_spark_runner.engines.torch.engine import ENGINE
from horovod_spark_runner.engines.torch.exchange import TensorCollectives
from horovod_spark_runner.engines.torch.trial import check_state, lone_world, try_trainee
from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.sync.allreduce import AllreduceSynchroniser
from tests.runs import source, spec_of
from tests.torch.test_parts_of_a_rank import (
    Seen,
    X,
    mean,
    network,
    squares,
    step,
    stepping,
    total,
    usual,
)

torch.set_num_threads(1)  # a process with a pool of threads cannot be forked


def trainee(made: Any) -> Any:
    synchroniser = AllreduceSynchroniser("none", TensorCollectives())
    return ENGINE.trainee(spec_of([X], model=source(made)), lone_world(), synchroniser)


def tried(made: Any, rows: int = 10) -> list[str]:
    """Return the warnings of a trial of what ``made`` returns."""
    return try_trainee(trainee(made), step(0, rows))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    unit = nn.functional.normalize(output, dim=1)
    alike, itself = unit @ unit.T / 0.1, torch.eye(len(output), dtype=torch.bool)
    same = (target[:, None] > 0) == (target[None] > 0)
    chances = alike.masked_fill(itself, -1e9).log_softmax(1)
    return -chances.masked_fill(itself | ~same, 0.0).mean()


def ranked(output: Tensor, target: Tensor) -> Tensor:
    order = -(target[:, None] - target[None]).sign()
    return nn.functional.softplus(order * (output - output.T)).mean()


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.std(0).mean()


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


def flat(*middle: nn.Module) -> nn.Sequential:
    """Return a network whose outputs begin as zeros."""
    made = network(*middle)
    nn.init.zeros_(made[-1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(made[-1].bias)  # type: ignore[arg-type]
    return made


def own(loss: Any, *middle: nn.Module, outputs: int = 1, clip: bool = False) -> TorchModel:
    step_of = stepping(loss, clip=clip)
    return TorchModel(network(*middle, outputs=outputs), train_step=step_of, optimizer="Adam")


def rivals(reduction: str) -> TorchModel:
    module = nn.ModuleDict({"maker": nn.Linear(3, 3), "judge": network()})

    def score(given: Tensor) -> Tensor:
        ones = torch.ones_like(given)
        return nn.functional.binary_cross_entropy_with_logits(given, ones, reduction=reduction)

    def train_step(own: Any) -> None:
        x = own.inputs[0]
        for name in ("judge", "maker"):
            optimizer = own.optimizers[name]
            optimizer.zero_grad()
            made = module["maker"](torch.randn(len(x), 3))
            value = score(module["judge"](made)) + score(module["judge"](x))
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    optimizers = {name: torch.optim.Adam(part.parameters()) for name, part in module.items()}
    return TorchModel(module, train_step=train_step, optimizer=optimizers)


def normalised(loss: Any) -> TorchModel:
    return own(loss, nn.BatchNorm1d(8), nn.Dropout(0.5), nn.LayerNorm(8))


TRIED: dict[str, tuple[Any, str]] = {
    "mean": (lambda: own(mean), ""),
    "sum over rows by their number": (lambda: own(lambda o, y: total(o, y) / len(y)), ""),
    "random layers": (lambda: normalised(mean), ""),
    "function that drops": (lambda: own(mean, Dropped()), ""),
    "clipping": (lambda: own(mean, clip=True), ""),
    "rivals": (lambda: rivals("mean"), ""),
    "nothing of the batch": (lambda: own(lambda o, y: 0.0 * o.sum()), ""),
    "rows": (lambda: usual(squares), ""),
    "known sum": (lambda: usual(nn.L1Loss(reduction="sum")), ""),
    "half": (lambda: usual(mean, nn.LayerNorm(8), autocast="bfloat16"), ""),
    "moving mean": (lambda: usual("MSELoss", Seen(lambda k, x: 0.9 * k + 0.1 * x.mean())), ""),
    "batches": (lambda: usual("MSELoss", Seen(lambda k, x: k + 1, torch.int64)), ""),
    "metric": (lambda: usual("MSELoss", metrics={"m": lambda o, y: float(mean(o, y))}), ""),
    "sum": (lambda: own(total), r"train_step.*\bsum.*rows"),
    "sum with random layers": (lambda: normalised(total), r"train_step.*\bsum.*rows"),
    "sum of what drops": (lambda: own(total, Dropped()), r"train_step.*\bsum.*rows"),
    "sum of rivals": (lambda: rivals("sum"), r"train_step.*\bsum.*rows"),
    "loss": (lambda: usual(total), r"'loss'.*\bsum.*rows"),
    "half sum": (lambda: usual(total, autocast="bfloat16"), r"'loss'.*\bsum.*rows"),
    "count": (lambda: usual("MSELoss", Seen(lambda k, x: k + len(x))), r"kept'.*\bsum"),
    "whole count": (
        lambda: usual("MSELoss", Seen(lambda k, x: k + len(x), torch.int64)),
        r"kept'.*\bsum",
    ),
    "metric sum": (lambda: usual("MSELoss", metrics={"all": total}), r"'all'.*\bsum"),
    "contrastive": (lambda: own(contrastive, outputs=4), "mean"),
    "mask": (lambda: own(lambda o, y: squares(o, y)[y > 0].mean()), "mean"),
    "zeros": (lambda: TorchModel(flat(), ranked, "SGD"), "'loss'.*mean"),
    "layer": (lambda: usual("MSELoss", Spread()), "mean"),
    "root": (
        lambda: usual("MSELoss", metrics={"root": lambda o, y: mean(o, y).sqrt()}),
        "'root'.*mean",
    ),
    "spread": (
        lambda: TorchModel(flat(), "MSELoss", "SGD", metrics={"spread": lambda o, y: o.std()}),
        "'spread'.*mean",
    ),
    "of rows": (
        lambda: usual("MSELoss", metrics={"each": lambda o, y: torch.acosh(o - 9).mean()}),
        "",
    ),
}


def failing(own: Any) -> None:
    raise LookupError("no such thing")


def ended(own: Any) -> None:
    os._exit(3)


TRIED.update(
    {
        "two rows": (lambda: usual(total), r"'loss'.*\bsum"),
        "failing": (
            lambda: TorchModel(network(), train_step=failing, optimizer="SGD"),
            "not tried.*no such thing",
        ),
        "ended": (
            lambda: TorchModel(network(), train_step=ended, optimizer="SGD"),
            "not tried.*ended without a result",
        ),
    }
)


@pytest.mark.parametrize("name", TRIED)
def test_a_step_and_metrics_are_tried_on_parts_of_rows(name: str) -> None:
    made, message = TRIED[name]
    rows = 2 if name == "two rows" else 10
    if r"\bsum" in message:
        with pytest.raises(ModelError, match=message):
            tried(made, rows)
        return
    warned = tried(made, rows)
    assert len(warned) == bool(message)
    assert not message or re.search(message, warned[0])


def test_a_trial_leaves_no_trace() -> None:
    calls: list[int] = []
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: (n + 1) / 8)

    def train_step(own: Any) -> None:
        calls.append(own.rows)
        stepping(mean)(own)
        schedule.step()

    before = torch.get_rng_state(), [v.clone() for v in module.state_dict().values()]
    rate = optimizer.param_groups[0]["lr"]
    assert tried(lambda: TorchModel(module, train_step=train_step, optimizer=optimizer)) == []
    assert calls == []
    assert optimizer.param_groups[0]["lr"] == rate
    assert torch.equal(before[0], torch.get_rng_state())
    assert all(map(torch.equal, before[1], module.state_dict().values()))


class Centred(nn.Module):
    """A loss with a running mean of its own."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centre += 0.1 * (target.mean() - self.centre)
        return squares(output, target - self.centre.clone()).mean()


def test_statistics_of_rows_that_ranks_do_not_share_are_refused() -> None:
    moving = Seen(lambda k, x: 0.9 * k + 0.1 * x.mean(), persistent=False)
    for made in (lambda: usual("MSELoss", moving), lambda: own(mean, moving)):
        with pytest.raises(ModelError, match=r"kept'.*persistent=False"):
            tried(made)
    with pytest.raises(ModelError, match=r"'centre' of Centred.*persistent"):
        tried(lambda: usual(Centred()))
    # The same on all ranks.
    cached = Seen(lambda k, x: k * 0 + x[0].numel(), persistent=False)
    noise = Seen(lambda k, x: torch.randn(()), persistent=False)
    for model in (cached, noise):
        assert tried(functools.partial(usual, "MSELoss", model)) == []


class Counter:
    """Counts; a checkpoint could hold it."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def beside(kind: str, given: bool) -> TorchModel:
    """Return a step that changes an object of a kind, which is given to the TorchModel or not."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    centre = nn.Parameter(torch.zeros(()))
    average = torch.optim.swa_utils.AveragedModel(module)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    counter, scaler = Counter(), torch.amp.GradScaler("cpu", growth_interval=2)
    apart = torch.optim.SGD([centre], 0.1)
    objects: dict[str, Any] = {
        "average": average, "schedule": schedule, "counter": counter, "scaler": scaler,
        "apart": apart,
    }  # fmt: skip

    def train_step(own: Any) -> None:
        own.optimizer.zero_grad()
        loss: Any = mean(own.module(own.inputs[0]), own.labels[0]) + (centre - 1).square()
        if kind == "scaler":
            scaled: Any = scaler.scale(loss)
            scaled.backward()
            own.synchronize()
            scaler.step(own.optimizer)
            scaler.update()
        else:
            loss.backward()
            own.optimizer.step()
        if kind == "average":
            average.update_parameters(module)
        elif kind == "schedule":
            schedule.step()
        elif kind == "counter":
            counter.calls += 1
        elif kind == "apart":
            apart.step()
        elif kind == "inner":
            inner = torch.optim.SGD([torch.zeros((), requires_grad=True)], 0.1)
            inner.param_groups[0]["lr"] = 0.2

    state = {kind: objects[kind]} if given else None
    return TorchModel(module, train_step=train_step, optimizer=optimizer, state=state)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("average", "AveragedModel.*state="),
        ("schedule", "LambdaLR.*schedule='step'"),
        ("counter", "Counter.*state="),
        ("scaler", "GradScaler.*state="),
        ("apart", "optimizer.*SGD.*gradients"),
        ("inner", ""),
        ("nothing", ""),
    ],
)
def test_objects_that_no_checkpoint_holds_are_refused(kind: str, message: str) -> None:
    if not message:
        assert check_state(trainee(lambda: beside(kind, False)), step(0, 10)) == []
        return
    with pytest.raises(ModelError, match=message):
        check_state(trainee(lambda: beside(kind, False)), step(0, 10))
    if kind != "apart":
        assert check_state(trainee(lambda: beside(kind, True)), step(0, 10)) == []
