"""What a rank makes of a module, in this process: what it keeps, forgets and refuses."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpi4py.MPI  # noqa: F401 - it listens from its import on, so before the tests
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import (
    AsyncServer,
    ModelError,
    TopK,
    TorchCallback,
    TorchModel,
)
from horovod_spark_runner.checkpoint.rank_state import (
    RankState,
    capture_rank,
    restore_rank,
    state_for,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.read.reader import Batch
from horovod_spark_runner.sync.allreduce import AllreduceSynchroniser
from horovod_spark_runner.sync.asynchronous import AsyncSynchroniser
from horovod_spark_runner.sync.compressed import CompressedSynchroniser
from horovod_spark_runner.sync.mpi import MpiWire
from horovod_spark_runner.training.agreement import _rows_to_try
from horovod_spark_runner.training.epochs import Step
from horovod_spark_runner.training.spec import Binding
from tests.runs import source, spec_of
from tests.torch.models import flat_weights

pytestmark = pytest.mark.mpi

X = Column("x", "float32", (3,))


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    from horovod_spark_runner.engines.torch.trainee import begin

    begin(0)


def trainee(made: Any, sync: Any = None, **fields: Any) -> Any:
    """Return what a rank makes of what ``made`` returns, as its only one."""
    from mpi4py import MPI

    from horovod_spark_runner.engines.torch.engine import ENGINE
    from horovod_spark_runner.engines.torch.exchange import TensorCollectives

    synchroniser = sync or AllreduceSynchroniser("none", TensorCollectives())
    return ENGINE.trainee(spec_of([X], model=source(made), **fields), MPI.COMM_SELF, synchroniser)


def alone() -> AsyncSynchroniser:
    """Return the way of the first of two ranks that make steps by themselves."""
    from horovod_spark_runner.engines.torch.exchange import TensorCollectives

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
        ("late", r"'late'.*None.*float32.*\(3,\)"),
        ("shape", r"'mean'.*float32.*\(3,\).*\(2,\)"),
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
    assert [output.dtype for output in narrow.outputs()] == ["float32"]  # what it predicts


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
    with pytest.raises(ModelError, match=r"SGD.*\b5 parameters.*\b4\b"):
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
    from horovod_spark_runner.engines.torch.exchange import TensorCollectives

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


def reporting(*names: str) -> TorchModel:
    module = nn.Linear(3, 1)

    def train_step(step: Any) -> dict[str, Any]:
        found = {"mean": step.labels[0].mean(), "least": step.labels[0].min()}
        return {name: found[name] for name in names}

    sgd = torch.optim.SGD(module.parameters(), lr=0.0)
    return TorchModel(module, train_step=train_step, optimizer=sgd)


def test_what_ranks_report_in_another_order_is_added_up_by_name() -> None:
    """One rank goes on within an epoch of two."""
    from horovod_spark_runner.engines.torch.exchange import TensorCollectives

    sync = AllreduceSynchroniser("none", TensorCollectives())
    ranks = [trainee(lambda n=n: reporting(*n)) for n in (("mean", "least"), ("least", "mean"))]
    states = []
    for rank, each in enumerate(ranks):
        each.reset_metrics()
        train(each, rank)
        hooks = each.hooks(steps=2, resumed=False)
        state = capture_rank(each, hooks, sync, rank=rank, in_epoch=True)
        states.append(RankState(json.loads(json.dumps(state.values)), state.arrays))
    last = trainee(lambda: reporting("least", "mean"))
    restore_rank(state_for(states, 0, 1), last, last.hooks(steps=2, resumed=True), sync)
    labels = [step(number).batch.arrays["y"] for number in range(2)]
    assert last.results("train", None, 1.0) == {
        "least": pytest.approx(np.mean([each.min() for each in labels])),
        "mean": pytest.approx(np.mean(labels)),
    }


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
    with pytest.raises(ModelError, match="step.*=AsyncServer.*schedule='epoch'"):
        trainee(made("step"), alone())


def test_predictions_that_depend_on_the_rows_beside_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from horovod_spark_runner.engines.torch import trainee as module

    told: list[str] = []
    monkeypatch.setattr(module, "notify", told.append)
    batch = functools.partial(nn.BatchNorm1d, 3, track_running_stats=False)
    for layer in (batch, functools.partial(nn.BatchNorm1d, 3)):
        network = nn.Sequential(layer(), nn.Linear(3, 1))
        one = trainee(lambda network=network: TorchModel(network, "MSELoss", "SGD"))
        one.save(RunDirectory(str(tmp_path)))
    assert len(told) == 1
    assert re.search("Sequential.*outputs.*rows", told[0])


def test_a_step_gets_whole_labels_as_int64_and_others_as_they_are() -> None:
    found: list[torch.dtype] = []

    def train_step(own: Any) -> None:
        found.append(own.labels[0].dtype)
        stepping(mean)(own)

    one = trainee(lambda: TorchModel(nn.Linear(3, 1), train_step=train_step, optimizer="SGD"))
    for dtype in (np.int32, np.uint8, np.int64, np.float32):
        given = step(0)
        given.batch.arrays["y"] = given.batch.arrays["y"].astype(dtype)
        one.train_step(given, (False,) * 3, last=False)
    assert found == [torch.int64] * 3 + [torch.float32]


def test_weights_of_steps_are_for_keras() -> None:
    train = spec_of([X, Column("w", "float32", (2,))]).train
    with pytest.raises(ModelError, match=r"'w'.*Keras.*per row"):
        trainee(
            lambda: TorchModel(nn.Linear(3, 1), "MSELoss", "SGD"),
            sample_weight_col="w",
            train=train,
        )


def test_rows_of_several_ranks_are_tried_where_each_has_one() -> None:
    others = [None, step(1, 1).batch.arrays, None]
    world: Any = SimpleNamespace(
        Get_rank=lambda: 0, bcast=lambda rows: rows, allgather=lambda own: [own, *others]
    )
    tried = _rows_to_try(world, step(0, 1).batch)
    assert tried.rows == 2
    np.testing.assert_array_equal(tried.arrays["y"][1:], step(1, 1).batch.arrays["y"])
    world.allgather = lambda own: [own, None, None]
    assert _rows_to_try(world, step(0, 40).batch).rows == 16


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target).square()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return squares(output, target).mean()


def total(output: Tensor, target: Tensor) -> Tensor:
    return squares(output, target).sum()


class Seen(nn.Module):
    """Keeps a number of the rows that it has seen."""

    kept: Tensor

    def __init__(
        self, change: Any, dtype: torch.dtype = torch.float32, *, persistent: bool = True
    ) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("kept", torch.zeros((), dtype=dtype), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = self.change(self.kept, x.detach())
        return x


def network(*middle: nn.Module, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), *middle, nn.Linear(8, outputs))


def stepping(loss: Any, *, clip: bool = False) -> Any:
    def train_step(own: Any) -> None:
        (x,), (y,) = own.inputs, own.labels
        own.optimizer.zero_grad()
        loss(own.module(x), y).backward()
        if clip:
            own.synchronize()
            nn.utils.clip_grad_norm_(own.module.parameters(), 0.01)
        own.optimizer.step()

    return train_step


def usual(loss: Any, *middle: nn.Module, **more: Any) -> TorchModel:
    return TorchModel(network(*middle), loss, "SGD", **more)


class Annealed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.tau, self.edges, self.mean = 1.0, torch.eye(3).to_sparse(), torch.zeros(3)
        self.last: Tensor | None = None
        self.scale, self.derived = 2.0, 2 * self.weight
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.tau *= 0.99
        self.mean = 0.9 * self.mean + x.mean(0)
        self.last, self.derived = x, 2 * self.weight
        self.calls += 1
        return super().forward(x) * self.tau * self.scale


def test_changed_values_that_no_checkpoint_holds_are_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from horovod_spark_runner.engines.torch import unsaved as module

    notices: list[str] = []
    monkeypatch.setattr(module, "notify", notices.append)

    def made() -> TorchModel:
        count, unchanged = 0, 1

        def train_step(step: Any) -> None:
            nonlocal count
            count += unchanged
            stepping(mean)(step)

        return TorchModel(Annealed(), train_step=train_step, optimizer="SGD")

    one = trainee(made)
    hooks = one.hooks(steps=1, resumed=False)
    hooks.capture()
    assert notices == []
    for number in range(2):
        train(one, number)
        hooks.capture()
    (text,) = notices
    names = {"tau", "mean", "last", "calls", "count"}
    assert set(re.findall(r"'(\w+)'", text)) == names


def test_memory_of_a_step_is_reported_whatever_it_is_kept_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.optim.swa_utils import AveragedModel

    from horovod_spark_runner.engines.torch import unsaved as module

    notices: list[str] = []
    monkeypatch.setattr(module, "notify", notices.append)

    def made() -> TorchModel:
        network, lazy, bank = nn.Linear(3, 1), dict[str, Tensor](), torch.zeros(300, 300)
        average, saved, fixed = AveragedModel(network), AveragedModel(network), nn.Linear(3, 1)
        shadow, smoothed = nn.Parameter(torch.zeros(3)), nn.CrossEntropyLoss(label_smoothing=0.1)
        hooked, none, phase = AveragedModel(network), None, "warm"
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        optimizer.register_step_post_hook(lambda *_: hooked.update_parameters(network))

        def train_step(step: Any, memo: dict[str, int] = {"steps": 0}) -> None:  # noqa: B006
            nonlocal none, phase
            stepping(mean)(step)
            none, phase = step.labels[0], "main"
            memo["steps"] += 1
            shadow.data += 1
            smoothed.label_smoothing *= 0.9
            lazy.update({name: one.detach().clone() for name, one in network.named_parameters()})
            bank[:100] += 1
            for each in (average, saved):
                each.update_parameters(network)
            fixed(step.inputs[0])

        kept = {"saved": saved}
        return TorchModel(network, train_step=train_step, optimizer=optimizer, state=kept)

    class Counting(TorchCallback):
        seen = 0

        def on_step_end(self, step: int, logs: Any) -> None:
            self.seen = self.seen + 1

    monkeypatch.setattr(module, "_MOST_SHOWN", 20)
    one = trainee(made, callbacks=[Counting()])
    hooks = one.hooks(steps=1, resumed=False)
    for number in range(3):
        hooks.capture()
        train(one, number)
        hooks.train_step_end(number, {})
    (text,) = notices
    changed = {"lazy", "bank", "average", "none", "phase", "memo", "shadow", "smoothed"}
    assert set(re.findall(r"variable '(\w+)'", text)) == changed
    assert "state of AveragedModel" in text
    assert "'seen' in 'callback Counting'" in text


def test_state_of_torchmetrics_is_kept_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_spark_runner.engines.torch import named_states as module

    torchmetrics = pytest.importorskip("torchmetrics")
    first, second = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    one, other = (
        trainee(lambda each=each: TorchModel(network(), "MSELoss", "SGD", state={"seen": each}))
        for each in (first, second)
    )
    first.update(3.0)
    captured = one.hooks(steps=1, resumed=False).capture()
    other.hooks(steps=1, resumed=True).restore(*captured)
    assert second.compute() == 3.0

    notices: list[str] = []
    monkeypatch.setattr(module, "notify", notices.append)

    def gathered(value: Any) -> list[Any]:
        large, small = value
        return [value, (large, {name: ("other", []) for name in small})]

    world = SimpleNamespace(allgather=gathered, bcast=lambda value: value, Get_rank=lambda: 0)
    one._states._world = world
    hooks = one.hooks(steps=1, resumed=False)
    for _ in range(2):
        hooks.capture()
    (text,) = [text for text in notices if "differ between ranks" in text]
    assert text.startswith("'seen' of TorchModel(state=…)")


def test_a_scheduler_that_watches_a_validation_steps_where_there_was_one() -> None:
    watching = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)

    def made() -> TorchModel:
        return TorchModel(nn.Linear(3, 1), "MSELoss", "SGD", watching)

    fit = FitOptions(batch_size=4, epochs=6, validation_freq=2)
    one, other = (trainee(made, fit=fit, validation=spec_of([X]).train) for _ in range(2))
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    plain = watching(alone)
    for number, value in enumerate((0.1, 3.0, 0.1, 2.0, 0.1, 2.5)):
        hooks = one.hooks(steps=1, resumed=False)
        validated = {"val_loss": value} if number % 2 else {}
        hooks.epoch_end(number, {"loss": 0.1, **validated})
        if validated:
            plain.step(value)
        other.hooks(steps=1, resumed=True).restore(*hooks.capture())
        one, other = other, one
    assert one._rates.read() == [group["lr"] for group in alone.param_groups]
    assert one._schedulers.by_name[""].best == 2.0


@pytest.mark.parametrize(
    ("shape", "labels", "fits"),
    [
        ((), [0, 1, 2, 1], True),
        ((3,), np.eye(3)[[0, 1, 2, 1]], True),
        ((3,), [[0, 1, 1]] * 4, False),
        ((4,), [[0, 1, 0, 0]] * 4, False),
    ],
    ids=["classes", "one-hot", "several", "sequences"],
)
def test_class_weights_need_one_class_per_row(
    shape: tuple[int, ...], labels: Any, fits: bool
) -> None:
    def loss(output: Tensor, label: Tensor) -> Tensor:
        return output.square().mean(1)

    one = trainee(
        lambda: TorchModel(nn.Linear(3, 3), loss, "SGD"),
        fit=FitOptions(batch_size=4, class_weight={0: 1.0, 1: 5.0}),
        labels=[Column("y", "float32", shape)],
    )
    given = step(0)
    given.batch.arrays["y"] = np.array(labels, np.float32)
    if fits:
        assert one._batches.of(given.batch.arrays, training=True).weights.tolist() == [1, 5, 1, 5]
    refused = pytest.raises(ModelError, match=r"class_weight.*'y'.*weight=")
    with contextlib.nullcontext() if fits else refused:
        one.train_step(given, (False,) * 3, last=False)


@pytest.mark.parametrize("name", ["loss", "one_loss"])
def test_a_metric_called_as_a_loss_is_refused(name: str) -> None:
    losses, metrics = {"one": "NLLLoss", "two": "NLLLoss"}, {name: lambda o, y: 0.0}
    with pytest.raises(ModelError, match=f"'{name}'"):
        trainee(
            lambda: TorchModel(Doubled(True), losses, "SGD", metrics=metrics),
            outputs=Binding(("y", "y"), ("one", "two")),
        )


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


def labelled(labels: Sequence[int]) -> Step:
    arrays: dict[str, Any] = {
        "x": np.zeros((len(labels), 3), np.float32),
        "y": np.array(labels, np.int64),
    }
    return Step(0, Batch(0, len(labels), arrays), len(labels), equal=True)


@pytest.mark.parametrize("loss", ["CrossEntropyLoss", nn.NLLLoss(), "MultiMarginLoss"])
def test_labels_out_of_the_range_of_classes_name_their_column(loss: Any) -> None:
    for first in ([0, 3], [0, -1], [0, 2]):  # in the first step, and in a later one
        one = trainee(lambda: TorchModel(nn.Linear(3, 3), loss, "SGD"))
        if first == [0, 2]:
            one.train_step(labelled(first), (False,) * 3, last=False)
        bad = [0, 3] if first == [0, 2] else first
        with pytest.raises(ModelError, match=rf"'y'.* {bad[1]}, .*3 classes.*StringIndexer"):
            one.train_step(labelled(bad), (False,) * 3, last=False)
    ignoring = nn.CrossEntropyLoss(ignore_index=-1)
    one = trainee(lambda: TorchModel(nn.Linear(3, 3), ignoring, "SGD"))
    one.train_step(labelled([0, -1]), (False,) * 3, last=False)


def test_ids_beyond_an_embedding_name_their_column() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x.long())[:, 0]  # type: ignore[no-any-return]

    ids = Column("x", "int64", (3,))
    spec: dict[str, Any] = {"train": spec_of([ids]).train}
    one = trainee(lambda: TorchModel(Embeds(), "MSELoss", "SGD"), **spec)
    arrays: dict[str, Any] = {"x": np.array([[0, 1, 7]] * 2), "y": np.zeros((2, 1), np.float32)}
    with pytest.raises(ModelError, match="x 0 to 7.*embedding"):
        one.train_step(Step(0, Batch(0, 2, arrays), 2, equal=True), (False,) * 3, last=False)


def test_images_that_a_convolution_cannot_take_are_explained() -> None:
    image = Column("x", "uint8", (8, 8, 3))
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.LazyLinear(1))
    with torch.no_grad():
        model(torch.zeros(1, 3, 8, 8))
    one = trainee(lambda: TorchModel(model, "MSELoss", "SGD"), train=spec_of([image]).train)
    arrays: dict[str, Any] = {
        "x": np.zeros((2, 8, 8, 3), np.uint8),
        "y": np.zeros((2, 1), np.float32),
    }
    with pytest.raises(ModelError, match=r"x \(2, 8, 8, 3\) uint8.*permute\(0, 3, 1, 2\) / 255"):
        one.train_step(Step(0, Batch(0, 2, arrays), 2, equal=True), (False,) * 3, last=False)


def test_a_loss_without_labels_is_refused() -> None:
    with pytest.raises(ModelError, match="label_cols.*autoencoder.*outputs alone"):
        trainee(lambda: TorchModel(nn.Linear(3, 3), "MSELoss", "SGD"), outputs=Binding(()))


class Keeping(TorchCallback):
    def __init__(self, kept: Any) -> None:
        self.kept, self.order = kept, list[str]()

    def on_train_begin(self, module: nn.Module) -> None:
        self.order.append("begin")

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.append("state")
        self.kept = state["kept"]


def test_states_of_callbacks_hold_tensors_and_are_refused_by_name() -> None:
    def model() -> TorchModel:
        return TorchModel(nn.Linear(3, 1), "MSELoss", "SGD")

    kept: dict[Any, Any] = {
        "best": torch.arange(3.0),
        3: [np.arange(2), (1, "a", None)],
        "loss": float("inf"),
    }
    first = trainee(model, callbacks=[Keeping(kept)]).hooks(steps=1, resumed=False)
    state, arrays = first.capture()
    again = Keeping(None)
    hooks = trainee(model, callbacks=[again]).hooks(steps=1, resumed=True)
    hooks.restore(json.loads(json.dumps(state)), arrays)
    assert torch.equal(again.kept["best"], kept["best"])
    assert again.kept[3][0].tolist() == [0, 1]
    assert again.kept[3][1] == (1, "a", None)
    assert again.kept["loss"] == float("inf")
    hooks = trainee(model, callbacks=[Keeping(object())]).hooks(steps=1, resumed=False)
    with pytest.raises(ModelError, match="Keeping.*object"):
        hooks.train_begin()
