"""What a rank makes of a module, in this process: what it keeps, forgets and refuses."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpi4py.MPI  # noqa: F401 - it listens from its import on, so before the tests
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import AsyncServer, InvalidInputError, ModelError, TopK, TorchModel
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.read.reader import Batch
from horovod_spark_runner.rundir.directory import RunDirectory
from horovod_spark_runner.settings.training import CheckpointOptions, FitOptions
from horovod_spark_runner.training.agreement import enough_to_try
from horovod_spark_runner.training.epochs import Step
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.sync.allreduce import AllreduceSynchroniser
from horovod_spark_runner.training.sync.asynchronous import AsyncSynchroniser
from horovod_spark_runner.training.sync.compressed import CompressedSynchroniser
from horovod_spark_runner.training.sync.wire import MpiWire
from tests.runs import source, spec_of
from tests.torch.models import flat_weights

pytestmark = pytest.mark.mpi

X = Column("x", "float32", (3,))


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    from horovod_spark_runner.training.torch.begin import begin

    begin(0)


def trainee(made: Any, sync: Any = None, **fields: Any) -> Any:
    """Return what a rank makes of what ``made`` returns, as its only one."""
    from mpi4py import MPI

    from horovod_spark_runner.training.torch.collectives import TensorCollectives
    from horovod_spark_runner.training.torch.trainees import trainee_of

    synchroniser = sync or AllreduceSynchroniser("none", TensorCollectives())
    return trainee_of(spec_of([X], model=source(made), **fields), MPI.COMM_SELF, synchroniser)


def alone() -> AsyncSynchroniser:
    """Return the way of the first of two ranks that make steps by themselves."""
    from horovod_spark_runner.training.torch.collectives import TensorCollectives

    ranks: Any = SimpleNamespace(rank=0, size=2)
    return AsyncSynchroniser(AsyncServer(), TensorCollectives(), ranks)


def step(number: int, rows: int = 4) -> Step:
    draw = np.random.default_rng(number)
    arrays = {
        "x": draw.normal(size=(rows, 3)).astype(np.float32),
        "y": draw.normal(size=rows).astype(np.float32),
    }
    return Step(number, Batch(number, rows, arrays), rows, equal=True)


def train(one: Any, *numbers: int) -> None:
    for number in numbers:
        one.train_step(step(number), (False,) * 3, last=False)


class Doubled(nn.Module):
    """Gives the logarithms of probabilities of three classes, once or twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)
        self.twice = twice

    def forward(self, x: Tensor) -> Any:
        given = self.net(x).log_softmax(1)
        return {"one": given, "two": given} if self.twice else given


class Following(nn.Module):
    """Sets its buffers to others."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.way = way
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.before: Tensor
        self.register_buffer("before", torch.zeros(3))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.before, self.mean = self.mean, 0.9 * self.mean + x.mean(0)
        if self.way == "late":
            self.late = x[0]
        if self.way == "shape":
            self.mean = self.mean[:2]
        found: Tensor = self.net(x)
        return found


def following(way: str = "") -> TorchModel:
    return TorchModel(Following(way), "MSELoss", "SGD")


def test_what_a_module_predicts_is_known_before_the_first_step() -> None:
    def made() -> TorchModel:
        module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2), nn.Softmax(1))
        return TorchModel(module, "CrossEntropyLoss", "SGD")

    one = trainee(made)
    generator = torch.get_rng_state()
    (output,) = one.outputs()
    assert (output.shape, output.dtype, output.activation) == ((2,), "float32", "softmax")
    assert all(part.training for part in one.module.modules())
    assert torch.equal(torch.get_rng_state(), generator)

    class Uncallable(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("not in evaluation")

    assert trainee(lambda: TorchModel(Uncallable(3, 1), "MSELoss", "SGD")).outputs() is None


def test_a_buffer_that_is_set_to_another_tensor_is_kept() -> None:
    one = trainee(following)
    alone = Following()
    for number in range(3):
        train(one, number)
        alone(torch.from_numpy(step(number).batch.arrays["x"]))
    found = {variable.path: variable for variable in one.variables.shared}
    for name in ("mean", "before"):
        np.testing.assert_array_equal(found[name].numpy(), alone.get_buffer(name))
    # Also one that a callback sets, before the step that follows.
    one.module.mean = torch.ones(3)
    np.testing.assert_array_equal(found["mean"].numpy(), np.ones(3))
    other = trainee(following)
    other.variables.restore(one.variables.capture())
    assert other.module.mean.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("late", r"buffer 'late' was None .* set it to float32 of shape \(3,\)"),
        ("shape", r"buffer 'mean' was float32 of shape \(3,\) .* set it to .* \(2,\)"),
    ],
)
def test_a_buffer_that_cannot_be_kept_is_refused(way: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        train(trainee(lambda: following(way)), 0)


def test_autocast_is_pytorchs() -> None:
    def net() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def model(autocast: Any) -> TorchModel:
        return TorchModel(net(), "MSELoss", plain_sgd, autocast=autocast)

    def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    narrow, wide = (trainee(lambda way=way: model(way)) for way in ("bfloat16", None))
    alone = net()
    optimizer = plain_sgd(alone.parameters())
    for number in range(3):
        train(narrow, number)
        train(wide, number)
        arrays = {name: torch.from_numpy(a) for name, a in step(number).batch.arrays.items()}
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = alone(arrays["x"])
            assert given.dtype == torch.bfloat16
            loss = nn.functional.mse_loss(given[:, 0], arrays["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found, expected = flat_weights(narrow.module), flat_weights(alone)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    away = np.abs(flat_weights(wide.module) - expected).max()
    assert away > 10 * np.abs(found - expected).max(), "autocast changes nothing"


def frozen() -> TorchModel:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    module[0].requires_grad_(requires_grad=False)
    return TorchModel(module, "MSELoss", "SGD")


def test_what_is_trained_later_is_trained_where_a_run_goes_on() -> None:
    one, other = trainee(frozen), trainee(frozen)
    one.module[0].requires_grad_(requires_grad=True)
    other.hooks(steps=1, resumed=True).restore(*one.hooks(steps=1, resumed=False).capture())
    before = other.module[0].weight.detach().clone()
    train(other, 0)
    assert not torch.equal(other.module[0].weight, before)


def test_parameters_that_an_optimizer_is_given_later_are_refused() -> None:
    one = trainee(frozen)
    (optimizer,) = one._optimizers.values()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ModelError, match="optimizer SGD has 5 parameters now, and had 4, .* when"):
        train(one, 0)


BALANCE = torch.tensor([1.0, 0.0, 2.0])


@pytest.mark.parametrize(
    ("loss", "label", "as_pytorch"),
    [
        (nn.CrossEntropyLoss(ignore_index=1), 1, True),
        (nn.CrossEntropyLoss(BALANCE, label_smoothing=0.1), -100, True),
        (nn.NLLLoss(BALANCE, ignore_index=2), 2, True),
        # PyTorch itself divides 0 by 0, and the weights are no numbers from then on.
        (nn.CrossEntropyLoss(BALANCE), 1, False),
    ],
    ids=["ignored", "smoothed", "nll", "class_weight_0"],
)
@pytest.mark.parametrize("way", ["allreduce", "top_k", "asynchronous", "two_losses"])
def test_labels_of_which_none_counts_change_nothing(
    loss: Any, label: int, as_pytorch: bool, way: str
) -> None:
    from horovod_spark_runner.training.torch.collectives import TensorCollectives

    def made() -> TorchModel:
        torch.manual_seed(4)
        losses = {"one": loss, "two": loss} if way == "two_losses" else loss
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return TorchModel(Doubled(way == "two_losses"), losses, sgd)

    sync = {  # type: ignore[no-untyped-call]
        "asynchronous": alone,
        "top_k": lambda: CompressedSynchroniser(TopK(ratio=1.0), TensorCollectives(), MpiWire()),
    }.get(way, lambda: None)()
    outputs = Binding(("y", "y"), ("one", "two")) if way == "two_losses" else Binding(("y",))
    one, plain = trainee(made, sync, outputs=outputs), made()
    module: Any = plain.module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for number, labels in enumerate(([0, 2, 0, label], [label] * 4, [2, 0, 2, 0])):
        given = step(number)
        given.batch.arrays["y"][:] = labels
        one.train_step(given, (False,) * 3, last=False)
        found = loss(
            module.net(torch.from_numpy(given.batch.arrays["x"])).log_softmax(1),
            torch.tensor(labels),
        )
        optimizer.zero_grad()
        (found * (2 if way == "two_losses" else 1)).backward()
        for parameter in () if as_pytorch or number != 1 else module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    expected = flat_weights(module)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(flat_weights(one.module), expected, rtol=0, atol=1e-6)


def test_a_result_of_which_nothing_counts_is_told_as_pytorch_does() -> None:
    def made() -> TorchModel:
        return TorchModel(nn.Linear(3, 2), nn.CrossEntropyLoss(), "SGD", metrics=["accuracy"])

    one = trainee(made)
    given = step(0)
    given.batch.arrays["y"][:] = -100
    logs, _ = one.train_step(given, (False,) * 3, last=False)
    assert set(logs) == {"loss", "accuracy"}, "best_metric would be of no training"
    for kind in ("train", "test"):
        results = one.results(kind, logs, 1.0)
        assert [*results] == ["loss", "accuracy"]
        assert all(np.isnan(value) for value in results.values())


# -- modules of Lightning --------------------------------------------------------------------------

lightning: Any = pytest.importorskip("lightning")
torchmetrics: Any = pytest.importorskip("torchmetrics")


class Counting(nn.Module):
    """Counts what it is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.calls, self.kinds = 0, dict[str, int]()
        self.last: Tensor | None = None
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kinds["x"] = self.kinds.get("x", 0) + 1
        self.seen += len(x)
        self.last = x
        found: Tensor = self.net(x)
        return found


class Module(lightning.LightningModule):
    """Follows two means, one of which it resets itself."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.part = Counting()
        self.given, self.own = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[-2:]
        self.given.update(y)
        self.own(y)  # computes for the batch as well
        self.log("given", self.given, on_step=False, on_epoch=True)
        loss: Tensor = (self(x)[:, 0] - y).square().mean()
        if self.way == "backward":
            self.manual_backward(loss, inputs=[self.part.net.bias])
            assert self.part.net.weight.grad is None
        if self.way == "gather":
            self.all_gather(y)
        return loss

    def on_train_start(self) -> None:
        if self.way == "start":
            self.log("start", 1.0)

    def on_train_epoch_start(self) -> None:
        self.own.reset()

    def on_train_epoch_end(self) -> None:
        self.log("own", self.own.compute())

    def validation_step(self, batch: Any) -> None:
        self.given.update(batch[1])
        self.log("val_given", self.given)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return ("note", *batch) if self.way == "note" else batch

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = self.way != "backward"
        return torch.optim.SGD(self.parameters(), lr=0.0)


def epoch(one: Any, hooks: Any, number: int, *steps: int) -> dict[str, Any]:
    """Train the steps of an epoch; return what it tells."""
    one.reset_metrics()
    hooks.epoch_begin(number)
    train(one, *steps)
    told: dict[str, Any] = hooks.epoch_end(number, one.results("train", None, 1.0))
    return told


def test_metrics_of_ranks_that_are_gone_are_of_their_epoch_only() -> None:
    """One rank goes on within an epoch of two."""
    parts = [trainee(Module) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.reset_metrics()
        part.hooks(steps=4, resumed=False).epoch_begin(0)
        train(part, rank)
    last = trainee(Module)
    hooks = last.hooks(steps=4, resumed=True)
    last.reset_metrics()
    hooks.epoch_begin(0)
    merges = last.metric_merges()
    held = [part.metric_variables() for part in parts]
    for variable, merge, *others in zip(last.metric_variables(), merges, *held, strict=True):
        arrays = [other.numpy() for other in others]
        variable.assign(sum(arrays) if merge == "sum" else np.concatenate(arrays))
    train(last, 2)
    for told, steps in (
        (hooks.epoch_end(0, last.results("train", None, 1.0)), (0, 1, 2)),
        (epoch(last, hooks, 1, 3, 4), (3, 4)),
    ):
        expected = np.mean([step(number).batch.arrays["y"] for number in steps])
        assert told["given"] == pytest.approx(expected, rel=1e-5)
        assert told["own"] == pytest.approx(expected, rel=1e-5)


def test_the_module_forgets_what_it_was_tried_on() -> None:
    one = trainee(Module)
    buffer = one.module.part.seen
    one.probe(step(0))
    part = one.module.part
    assert (part.calls, part.kinds, part.last, float(part.seen)) == (0, {}, None, 0.0)
    assert part.seen is buffer
    assert one.module.own._update_count == 0
    train(one, 0)
    assert (part.calls, part.kinds, float(part.seen)) == (1, {"x": 1}, 4.0)


def test_what_is_no_tensor_is_not_tried_in_parts() -> None:
    one = trainee(lambda: Module("note"))
    one.probe(step(0))
    train(one, 0)


def test_backward_gets_what_it_is_given() -> None:
    train(trainee(lambda: Module("backward")), 0)


def test_what_is_logged_where_it_would_be_lost_or_mixed() -> None:
    one = trainee(lambda: Module("start"))
    with pytest.raises(ModelError, match="on_train_start logs 'start', which is of no step"):
        one.hooks(steps=1, resumed=False).train_begin()
    with pytest.raises(ModelError, match=r"asks for trainer\.strategy\.all_gather, but is"):
        train(trainee(lambda: Module("gather")), 0)
    one = trainee(Module)
    hooks = one.hooks(steps=1, resumed=False)
    hooks.epoch_begin(0)
    train(one, 0)
    hooks.test_begin()
    message = "'val_given' is logged in validation, and as 'given' in training: .* rows of both"
    with pytest.raises(ModelError, match=message):
        one.test_step(step(1), last=True)


def test_the_best_metric_is_looked_for_where_there_was_a_validation() -> None:
    fit = FitOptions(batch_size=4, epochs=2, validation_freq=2)
    options = CheckpointOptions(best_metric="val_given")
    validation = spec_of([X]).train
    one = trainee(Module, fit=fit, checkpoints=options, validation=validation)
    hooks = one.hooks(steps=1, resumed=False)
    assert "given" in epoch(one, hooks, 0, 0)
    with pytest.raises(InvalidInputError, match="best_metric='val_given' is no metric of this"):
        epoch(one, hooks, 1, 1)


def test_a_value_of_the_last_step_is_that_of_those_who_log_it_last() -> None:
    from horovod_spark_runner.training.torch.lightning.logged import (
        TRAINING,
        Logged,
        merged,
        parts_of,
        results_of,
    )

    ranks = [Logged([], rank) for rank in range(2)]
    for number, steps in ((0, (0, 1)), (1, (0, 1, 2))):
        for at in steps:
            ranks[number].log("x", 10.0 * number + at, "training_step", 4, at, None, None)
    for rank in ranks:  # a name that both have left off with, before the last step
        rank.log("early", 5.0 + rank._rank, "training_step", 4, 0, None, None)
    told = results_of(merged(parts_of([rank.numpy() for rank in ranks])), TRAINING)
    assert told == {"x": 12.0, "early": 5.5}


def test_a_schedule_of_steps_is_refused_where_ranks_make_as_many_as_they_come_to() -> None:
    def made(schedule: Any) -> Any:
        return lambda: TorchModel(
            nn.Linear(3, 1),
            nn.MSELoss(),
            torch.optim.SGD,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            schedule=schedule,
        )

    trainee(made("epoch"), alone())
    with pytest.raises(ModelError, match=r"after every step .*=AsyncServer.*schedule='epoch'"):
        trainee(made("step"), alone())


def test_predictions_that_depend_on_the_rows_beside_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from horovod_spark_runner.training.torch import trainee as module

    told: list[str] = []
    monkeypatch.setattr(module, "notify", told.append)
    batch = functools.partial(nn.BatchNorm1d, 3, track_running_stats=False)
    for layer in (batch, functools.partial(nn.BatchNorm1d, 3)):
        network = nn.Sequential(layer(), nn.Linear(3, 1))
        one = trainee(lambda network=network: TorchModel(network, "MSELoss", "SGD"))
        one.save(RunDirectory(str(tmp_path)))
    assert len(told) == 1
    assert "Sequential gives other outputs for a row where the rows beside it are others" in told[0]


def test_functions_are_tried_on_rows_of_later_steps_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Labels above 9 are ignored, and are there in the fourth step."""
    from horovod_spark_runner.training.torch import trainee as module

    class Counting(nn.Linear):
        seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x)
            return super().forward(x)

    def made() -> TorchModel:
        network = Counting(3, 1)
        network.register_buffer("seen", torch.zeros(()))
        return TorchModel(network, ignoring, "SGD")

    def ignoring(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target).square()[target < 10].mean()

    told: list[str] = []
    monkeypatch.setattr(module, "notify", told.append)
    one = trainee(made)
    one._world = SimpleNamespace(Get_size=lambda: 2)
    one.probe(step(0))
    for number in range(8):
        given = step(number)
        if number >= 3:
            given.batch.arrays["y"][0] = 10.0
        assert len(told) == (number > 3)
        one.train_step(given, (False,) * 3, last=False)
    assert "'loss' is no mean over the rows of a batch" in told[0]
    assert float(one.module.seen) == 8 * 4, "what it is tried on does not count"


def test_a_sum_is_found_by_the_rows_of_several_ranks_where_each_has_one() -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target).square().sum()

    one = trainee(lambda: TorchModel(nn.Linear(3, 1), summed, "SGD"))
    others = [None, step(1, 1).batch.arrays, None]
    world: Any = SimpleNamespace(
        Get_rank=lambda: 0, bcast=lambda rows: rows, gather=lambda own: [own, *others]
    )
    tried = enough_to_try(world, step(0, 1).batch)
    assert tried.rows == 2
    np.testing.assert_array_equal(tried.arrays["y"][1:], step(1, 1).batch.arrays["y"])
    with pytest.raises(ModelError, match="'loss' is a sum over the rows"):
        one.probe(replace(step(0, 1), batch=tried))
    whole = step(0, 2).batch
    assert enough_to_try(world, whole) is whole


def test_a_loss_that_is_a_sum_is_that_of_a_global_batch_whoever_takes_its_parts() -> None:
    def made() -> TorchModel:
        return TorchModel(
            nn.Linear(3, 1), nn.L1Loss(reduction="sum"), lambda p: torch.optim.SGD(p, lr=0.0)
        )

    one = trainee(made, alone())
    whole = [step(number) for number in range(3)]
    for each in whole:  # of which this rank takes 5 halves
        for begin in (0, 2) if each.number else (0,):
            arrays = {name: array[begin : begin + 2] for name, array in each.batch.arrays.items()}
            half = replace(each, batch=Batch(each.number, 2, arrays), equal=False)
            one.train_step(half, (False,) * 3, last=False)
    with torch.no_grad():
        given = [one.module(torch.from_numpy(each.batch.arrays["x"])) for each in whole]
    off = [y[:, 0].numpy() - each.batch.arrays["y"] for y, each in zip(given, whole, strict=True)]
    total = np.abs(off).sum() - np.abs(off[0][2:]).sum()
    assert one.results("train", None, 1.0)["loss"] == pytest.approx(total / 2.5, rel=1e-5)
