"""What a PyTorch training is made of, each part by itself."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import InvalidInputError, ModelError, TorchModel
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.frameworks import KERAS, TORCH
from horovod_spark_runner.training.engine import engine_of
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.torch.build import check_module
from horovod_spark_runner.training.torch.feeding import input_feed
from horovod_spark_runner.training.torch.losses import Losses
from horovod_spark_runner.training.torch.optimizers import make_optimizers, settings_of
from horovod_spark_runner.training.torch.probe import check_means
from horovod_spark_runner.training.torch.schedulers import Schedulers, planned_schedulers
from horovod_spark_runner.training.torch.source import model_source
from horovod_spark_runner.training.torch.variables import TorchVariables, as_array, set_tensor
from tests.torch.models import TwoHeads, digits_model, digits_net

NET = nn.Linear(3, 1)


def annotated() -> TorchModel:
    return digits_model()


def other() -> Any:
    return 3


def local() -> Any:
    from horovod_spark_runner import TorchModel as Local

    return Local(NET, "MSELoss", "SGD")


def test_a_function_says_that_it_is_for_pytorch() -> None:
    functions = (annotated, local, lambda: annotated(), functools.partial(annotated))
    given = (*functions, lambda: TorchModel(NET, "MSELoss", "SGD"), digits_model(), NET)
    assert {engine_of(each) for each in given} == {TORCH}
    assert {engine_of(each) for each in (other, lambda: other(), "model.keras", None)} == {KERAS}
    with pytest.raises(ModelError, match=r"a Linear, a module without loss and optimizer"):
        model_source(NET)
    assert model_source(digits_model()).engine == TORCH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "SGD"}, "needs a loss"),
        ({"loss": "MSELoss"}, "needs an optimizer"),
        ({"loss": "MSELoss", "optimizer": "SGD", "clip_norm": 0}, "clip_norm must be a positive"),
        ({"loss": "MSELoss", "optimizer": "SGD", "autocast": "float16"}, "must be one of bfloat16"),
    ],
)
def test_what_a_torch_model_must_have(fields: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        TorchModel(NET, **fields)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("Sgd", r"'Sgd' is no optimizer of torch\.optim; there are .*Adam"),
        (lambda p: torch.optim.LBFGS(p), "computes gradients several times a step"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "are not the module's"),
        (lambda p: 3, "must be a torch.optim.Optimizer, got 3"),
        ({"a": torch.optim.SGD(NET.parameters(), lr=1.0)}, "several optimizers need a train_step"),
    ],
)
def test_optimizers_that_cannot_be_used(optimizer: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_optimizers(TorchModel(NET, "MSELoss", optimizer), NET)


def test_modules_that_cannot_be_kept() -> None:
    with pytest.raises(ModelError, match=r"compiled by torch\.compile"):
        check_module(torch.compile(NET))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="has no shape yet"):
        check_module(nn.LazyLinear(3))


COLUMNS = {
    "image": Column("image", "float32", (64,)),
    "group": Column("group", "int32"),
    "word": Column("word", "string"),
}


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (Binding(("image",)), r"takes image, group, but feature_cols feeds 1"),
        (Binding(("group", "width"), ("group", "shade")), "no parameter 'shade'"),
        (Binding(("image",), ("image",)), "nothing feeds 'group'"),
        (Binding(("group", "width")), "'group' is called as an input, but stands where another"),
        (Binding(("image", "word")), "'word' holds strings"),
    ],
)
def test_columns_that_do_not_feed_a_module(binding: Binding, message: str) -> None:
    known = {**COLUMNS, "width": Column("width", "int32")}
    with pytest.raises(ModelError, match=message):
        input_feed(TwoHeads(), binding, known)


def test_columns_called_as_parameters_feed_them_in_any_order() -> None:
    feed = input_feed(TwoHeads(), Binding(("group", "image")), COLUMNS)
    assert feed.names == ("group", "image")
    arrays = {"image": np.ones((2, 64), np.float32), "group": np.zeros(2, np.int32)}
    values = feed.values(arrays, torch.device("cpu"))
    assert values[1].data_ptr() == arrays["image"].ctypes.data, "it was copied"
    assert set(feed.call(TwoHeads(), values)) == {"number", "kind"}


def loss_of(given: Any, output: Tensor, label: Tensor, weights: Tensor | None = None) -> float:
    losses = Losses(given, Binding(("y",)), weighted=weights is not None)
    (term,) = losses.terms(output, [label], [output], weights)
    return float(term.summed) / float(term.count)


def test_losses_are_those_of_pytorch() -> None:
    torch.manual_seed(0)
    scores, classes = torch.randn(7, 4), torch.tensor([0, 1, 2, 3, 3, 1, 0])
    balance = torch.tensor([1.0, 2.0, 0.5, 3.0])
    for loss in (nn.CrossEntropyLoss(balance), nn.CrossEntropyLoss(ignore_index=3)):
        assert loss_of(loss, scores, classes) == pytest.approx(float(loss(scores, classes)))
    # Spark ML's labels are doubles.
    expected = float(nn.functional.cross_entropy(scores, classes))
    assert loss_of("CrossEntropyLoss", scores, classes.float()) == pytest.approx(expected)
    # A column of numbers is never compared with all rows of an output of one number.
    output, label = torch.randn(7, 1), torch.randn(7)
    expected = float((output[:, 0] - label).square().mean())
    assert loss_of("MSELoss", output, label) == pytest.approx(expected)
    weights = torch.arange(7.0)
    expected = float((weights * (output[:, 0] - label).abs()).mean())
    assert loss_of("L1Loss", output, label, weights) == pytest.approx(expected)
    images, pixels = torch.randn(7, 4, 3), torch.randint(0, 4, (7, 3))
    expected = float(nn.functional.cross_entropy(images, pixels))
    assert loss_of("CrossEntropyLoss", images, pixels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "output", "label", "message"),
    [
        ("MseLoss", (2, 1), torch.zeros(2), "is no loss of an output and a label"),
        ("MSELoss", (2, 3), torch.zeros(2), r"rows of shape \(3,\) and the label rows of shape \("),
        ("CrossEntropyLoss", (2, 3), torch.tensor([0.5, 1.0]), "holds fractions such as 0.5"),
        ("CrossEntropyLoss", (2, 3), torch.tensor([0, 3]), "label 3, but the output has 3 classes"),
        (lambda o, y: 3.0, (2, 3), torch.zeros(2), "must return a tensor"),
        (lambda o, y: o[:1, 0], (2, 3), torch.zeros(2), r"returned shape \(1,\) for 2 rows"),
    ],
)
def test_losses_that_cannot_be_computed(
    given: Any, output: tuple[int, ...], label: Tensor, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        loss_of(given, torch.zeros(output), label)


def test_a_sum_over_rows_is_refused_and_what_is_no_mean_is_told() -> None:
    output, label = torch.arange(6.0), torch.zeros(6)
    functions = [("total", lambda o, y: (o - y).sum())]
    with pytest.raises(ModelError, match="'total' is a sum over the rows"):
        list(check_means(functions, output, label))
    told = list(check_means([("top", lambda o, y: (o - y).max())], output, label))
    assert len(told) == 1
    assert "'top' is no mean" in told[0]
    assert not list(check_means([("mean", lambda o, y: (o - y).mean())], output, label))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax"])
def test_an_optimizer_goes_on_from_what_was_kept(name: str) -> None:
    def made() -> tuple[nn.Module, Any, TorchVariables]:
        net = digits_net()
        (optimizer,) = make_optimizers(TorchModel(net, "MSELoss", name), net).values()
        if name == "SGD":
            optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
        return net, optimizer, TorchVariables(net, [optimizer])

    def step(net: nn.Module, optimizer: Any, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()

    net, optimizer, variables = made()
    step(net, optimizer, 0)
    kept, described, trained = variables.capture(), variables.describe(), variables.trained_by()
    step(net, optimizer, 1)
    again, other_optimizer, restored = made()
    restored.build_optimizers(trained)
    restored.check_same(described, "there")
    restored.restore(kept)
    step(again, other_optimizer, 1)
    for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            ],
            [2],
        ),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ],
)
def test_a_scheduler_goes_on_from_json(make: Any) -> None:
    import json

    from horovod_spark_runner.training.torch.optimizers import restore_settings

    def made() -> tuple[Any, Schedulers, list[dict[str, Any]]]:
        model = TorchModel(NET, "MSELoss", functools.partial(torch.optim.SGD, lr=0.1), make)
        optimizers = make_optimizers(model, NET)
        optimizer = optimizers[""]
        schedulers = Schedulers(planned_schedulers(model, optimizers))
        return optimizer, schedulers, settings_of(optimizer)

    optimizer, schedulers, begun = made()
    for _ in range(2):
        optimizer.step()
        schedulers.after_epoch(0, {"loss": 1.0})
    kept = json.loads(json.dumps([begun, settings_of(optimizer), schedulers.capture()]))
    again, others, _ = made()
    restore_settings(again, kept[0], kept[1])
    others.restore(kept[2])
    for loss in (1.0, 0.5, 0.5, 0.5):
        for one, each in ((optimizer, schedulers), (again, others)):
            one.step()
            each.after_epoch(0, {"loss": loss})
        assert settings_of(again) == settings_of(optimizer)


def test_bfloat16_goes_through_numpy_as_it_is() -> None:
    tensor = torch.randn(5).to(torch.bfloat16)
    array = as_array(tensor)
    assert array.dtype.name == "bfloat16"
    other = torch.zeros(5, dtype=torch.bfloat16)
    set_tensor(other, array)
    assert torch.equal(other, tensor)
