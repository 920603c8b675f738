"""What a PyTorch training is made of, each part by itself."""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from horovod_spark_runner import (
    Allreduce,
    DiLoCo,
    InvalidInputError,
    LocalSGD,
    ModelError,
    TorchCallback,
    TorchEarlyStopping,
    TorchModel,
)
from horovod_spark_runner.checkpoint.model_state import broadcast
from horovod_spark_runner.checkpoint.rank_state import RankState, capture_rank, restore_rank
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.torch.batch_norm import synchronise_norms
from horovod_spark_runner.engines.torch.binding import match_inputs
from horovod_spark_runner.engines.torch.callbacks import check_callbacks
from horovod_spark_runner.engines.torch.engine import ENGINE
from horovod_spark_runner.engines.torch.loading import load_initial_weights
from horovod_spark_runner.engines.torch.losses import CLASSES, ELEMENTS, Losses
from horovod_spark_runner.engines.torch.model import build_model, check_module
from horovod_spark_runner.engines.torch.named_states import NamedStates
from horovod_spark_runner.engines.torch.optimizers import (
    OptimizerSettings,
    Schedulers,
    check_complex,
    check_gradients,
    make_optimizers,
    settings_of,
)
from horovod_spark_runner.engines.torch.state import TorchVariables, as_array, set_tensor
from horovod_spark_runner.engines.torch.trainee import TorchTrainee
from horovod_spark_runner.engines.torch.trial import lone_world
from horovod_spark_runner.frameworks import KERAS, TORCH
from horovod_spark_runner.storage.contents import Contents
from horovod_spark_runner.sync.local_sgd import LocalSGDSynchroniser
from horovod_spark_runner.training.engine import engine_of
from horovod_spark_runner.training.spec import Binding, WarmStart
from horovod_spark_runner.training.trainee import Hooks
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
    with pytest.raises(ModelError, match="Linear.*loss.*optimizer"):
        ENGINE.source(NET, None)
    assert ENGINE.source(digits_model(), None).engine == TORCH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "SGD"}, "loss"),
        ({"loss": "MSELoss"}, "optimizer"),
        ({"loss": "MSELoss", "optimizer": "SGD", "clip_norm": 0}, "clip_norm"),
        ({"loss": "MSELoss", "optimizer": "SGD", "autocast": "float16"}, "bfloat16"),
    ],
)
def test_what_a_torch_model_must_have(fields: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        TorchModel(NET, **fields)


def test_loss_and_optimizer_in_the_wrong_order_are_refused() -> None:
    loss, optimizer = torch.nn.MSELoss(), torch.optim.SGD(NET.parameters(), lr=0.1)
    TorchModel(NET, loss, optimizer)
    for given in ((optimizer, loss), (optimizer, "MSELoss"), ("SGD", loss)):
        with pytest.raises(ModelError, match=r"TorchModel\(module, loss, optimizer"):
            TorchModel(NET, *given)


class Keras(TorchCallback):
    def on_train_begin(self, module: torch.nn.Module) -> None: ...

    def on_batch_of_mine(self) -> None: ...

    def on_train_batch_end(self, batch: int, logs: Any) -> None: ...


class Lightning(TorchCallback):
    def on_train_epoch_start(self) -> None: ...


def test_hooks_that_nobody_would_call_are_refused() -> None:
    told = "{}.*TorchCallback.*on_train_begin.*on_"
    for callback, name in ((Keras(), "on_train_batch_end"), (Lightning(), "on_train_epoch_start")):
        for given in (callback, [TorchEarlyStopping(), callback]):
            with pytest.raises(InvalidInputError, match=told.format(name)):
                ENGINE.check_callbacks(given)
            with pytest.raises(InvalidInputError, match=told.format(name)):
                check_callbacks(given)
        with pytest.raises(InvalidInputError, match=told.format(name)):
            check_callbacks(lambda: [callback])  # noqa: B023


def test_a_lightning_module_is_for_its_own_trainer() -> None:
    lightning: Any = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        pass

    def returning() -> Any:
        return Module()

    def build(given: Any) -> None:
        assert engine_of(given) == TORCH
        build_model(ENGINE.source(given, None))

    for given in (Module, Module(), lambda: TorchModel(Module(), "MSELoss", "SGD"), returning):
        with pytest.raises(ModelError, match=r"Module.*HorovodRunner.*torch_dataset.*torch\.md"):
            build(given)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("Sgd", r"'Sgd'.*torch\.optim.*Adam"),
        (lambda p: torch.optim.LBFGS(p), "gradients.*step"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "module"),
        (lambda p: 3, r"torch.optim.Optimizer.*\b3"),
        ({"a": torch.optim.SGD(NET.parameters(), lr=1.0)}, "optimizers.*train_step"),
    ],
)
def test_optimizers_that_cannot_be_used(optimizer: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_optimizers(TorchModel(NET, "MSELoss", optimizer), NET)


def test_modules_that_cannot_be_kept() -> None:
    with pytest.raises(ModelError, match=r"torch\.compile"):
        check_module(torch.compile(NET))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="shape"):
        check_module(nn.LazyLinear(3))


def test_weights_that_ranks_would_change_or_send_otherwise() -> None:
    scaling = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))
    check_gradients(scaling, alone=True)
    with pytest.raises(ModelError, match=r"layer '0'.*max_norm=1\b.*ranks"):
        check_gradients(scaling, alone=False)
    turning = nn.Linear(2, 1, dtype=torch.complex64)
    check_complex(turning, Allreduce(), 1)
    ways: list[tuple[Any, int]] = [
        (Allreduce(), 2),
        (Allreduce(compression="fp16"), 1),
        (LocalSGD(every=2), 2),
    ]
    for sync, ranks in ways:
        with pytest.raises(ModelError, match="'weight'.*complex.*view_as_real"):
            check_complex(turning, sync, ranks)


class Scaled(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_layer_with_a_forward_of_its_own_is_not_synchronised() -> None:
    wrapped = nn.BatchNorm1d(2)
    wrapped.forward = functools.partial(wrapped.forward)  # type: ignore[method-assign]
    exchange: Any = None  # is not used yet
    for layer in (Scaled(2), wrapped):
        with pytest.raises(ModelError, match="'1'.*forward.*sync_batch_norm"):
            synchronise_norms(nn.Sequential(nn.Linear(3, 2), layer), exchange)


COLUMNS = {
    "image": Column("image", "float32", (64,)),
    "group": Column("group", "int32"),
    "word": Column("word", "string"),
}


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (Binding(("image",)), r"image, group.*feature_cols.*\b1"),
        (Binding(("group", "width"), ("group", "shade")), "'shade'"),
        (Binding(("image",), ("image",)), "'group'"),
        (Binding(("group", "width")), "'group'.*input"),
        (Binding(("image", "word")), "'word'.*string"),
    ],
)
def test_columns_that_do_not_feed_a_module(binding: Binding, message: str) -> None:
    known = {**COLUMNS, "width": Column("width", "int32")}
    with pytest.raises(ModelError, match=message):
        match_inputs(TwoHeads(), binding, known)


def test_columns_called_as_parameters_feed_them_in_any_order() -> None:
    feed = match_inputs(TwoHeads(), Binding(("group", "image")), COLUMNS)
    assert feed.names == ("group", "image")
    arrays = {"image": np.ones((2, 64), np.float32), "group": np.zeros(2, np.int32)}
    values = feed.values(arrays, torch.device("cpu"))
    assert values[1].data_ptr() == arrays["image"].ctypes.data, "it was copied"
    assert set(feed.call(TwoHeads(), values)) == {"number", "kind"}


class Supervised(nn.Module):
    """A loss that can be had without labels, too, and is another one then."""

    def forward(self, output: Tensor, label: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return scale * (output if label is None else output - label).square().mean()


def loss_of(given: Any, output: Tensor, label: Tensor, weights: Tensor | None = None) -> float:
    losses = Losses(given, Binding(("y",)))
    (term,) = losses.terms(output, [label], [output], weights)
    return float(term.summed) / float(term.count)


LABELS: dict[str, Callable[[Tensor], Tensor]] = {
    "MultiLabelMarginLoss": lambda scores: torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0]]),
    "MultiMarginLoss": lambda scores: torch.tensor([3, 0]),
    "CrossEntropyLoss": lambda scores: torch.tensor([3, 0]),
    "NLLLoss": lambda scores: torch.tensor([3, 0]),
    "HingeEmbeddingLoss": lambda scores: torch.randn_like(scores).sign(),
    "SoftMarginLoss": lambda scores: torch.randn_like(scores).sign(),
}


@pytest.mark.parametrize("cls", [*CLASSES, *ELEMENTS], ids=lambda cls: cls.__name__)
def test_weights_of_one_change_no_loss(cls: Any) -> None:
    torch.manual_seed(2)
    scores = torch.rand(2, 4)
    name = cls.__name__
    label = LABELS.get(name, torch.rand_like)(scores)
    expected = float(cls()(scores, label))
    for loss in (cls(), cls(reduction="none")):
        for weights in (None, torch.ones(2)):
            assert loss_of(loss, scores, label, weights) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 3), (2, 4, 3, 5)])
def test_a_loss_of_probabilities_of_all_classes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    scores, label = torch.randn(shape), torch.rand(shape).softmax(1)
    for smoothing in (0.0, 0.1):
        loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2, 0.5, 3]), label_smoothing=smoothing)
        expected = float(loss(scores, label))
        assert loss_of(loss, scores, label) == pytest.approx(expected, rel=1e-6)
        assert loss_of(loss, scores, label, torch.ones(2)) == pytest.approx(expected, rel=1e-6)


def weights_file(held: object, *, skip_mismatch: bool = False) -> WarmStart:
    file = io.BytesIO()
    torch.save(held, file)
    contents = {"last.pt": Contents(file.getvalue())}
    return WarmStart("last.pt", "weights", contents, skip_mismatch=skip_mismatch)


@pytest.mark.parametrize("key", ["", "state_dict", "model_state_dict"])
def test_weights_to_begin_with_may_be_a_part_of_what_a_file_holds(key: str) -> None:
    """As those of Lightning's checkpoints are, and of PyTorch's tutorials."""
    given = nn.Linear(3, 2)
    held = {"epoch": 3, "optimizer_states": [{}], key: given.state_dict()}
    taken = nn.Linear(3, 2)
    load_initial_weights(taken, weights_file(held if key else given.state_dict()))
    assert torch.equal(taken.weight, given.weight)
    assert torch.equal(taken.bias, given.bias)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "other."])
def test_names_of_weights_that_do_not_fit_are_told(prefix: str, skip: bool) -> None:
    named = {f"{prefix}{name}": value for name, value in nn.Linear(3, 2).state_dict().items()}
    with pytest.raises(ModelError) as raised:
        load_initial_weights(nn.Linear(3, 2), weights_file(named, skip_mismatch=skip))
    told = str(raised.value)
    assert f"'{prefix}weight' (2, 3)" in told
    assert "'weight' (2, 3)" in told
    assert (f"removeprefix('{prefix}')" in told) == (prefix != "other.")
    assert "skip_mismatch" not in told


def test_values_of_one_type_are_given_to_tensors_of_another() -> None:
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)
    for theirs in types:
        for ours in types:
            given, tensor = torch.tensor([1, 2, 3], dtype=theirs), torch.zeros(3, dtype=ours)
            set_tensor(tensor, as_array(given))
            assert tensor.tolist() == [1, 2, 3], (theirs, ours)


def stopped_after(patience: int, losses: list[float]) -> int | None:
    """Return the epoch, from 0, after which `TorchEarlyStopping` ends a training."""
    callback = TorchEarlyStopping(patience=patience)
    for epoch, loss in enumerate(losses):
        callback.on_epoch_end(epoch, {"val_loss": loss})
        if callback.stop_training:
            return epoch
    return None


def test_an_early_end_comes_when_keras_would_end() -> None:
    assert [stopped_after(patience, [2.0, 1.0, 3.0, 3.0, 3.0, 3.0]) for patience in range(4)] == [
        2,
        2,
        3,
        4,
    ]
    assert stopped_after(2, [math.nan, 3.0, 2.0, 1.0]) is None
    assert stopped_after(1, [math.inf, 3.0, 2.0, 1.0]) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_delta": -0.1}, "min_delta.*-0.1"),
        ({"min_delta": "0.1"}, "min_delta.*'0.1'"),
        ({"monitor": 3}, r"monitor.*\b3"),
        ({"patience": -1}, r"patience.*\b0"),
        ({"mode": "auto"}, r"mode.*\bmin\b.*\bmax"),
    ],
)
def test_an_early_end_says_what_it_cannot_be_given(given: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        TorchEarlyStopping(**given)


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
    # What can do without labels is given them, as a module of a library is anywhere.
    expected = float((output[:, 0] - label).square().mean())
    assert loss_of(Supervised(), output[:, 0], label) == pytest.approx(expected)
    assert loss_of(lambda o: o.square().mean(), output, label) == pytest.approx(
        float(output.square().mean())
    )
    images, pixels = torch.randn(7, 4, 3), torch.randint(0, 4, (7, 3))
    expected = float(nn.functional.cross_entropy(images, pixels))
    assert loss_of("CrossEntropyLoss", images, pixels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "output", "label", "message"),
    [
        ("MseLoss", (2, 1), torch.zeros(2), "loss"),
        ("MSELoss", (2, 3), torch.zeros(2), r"\(3,\).*label"),
        ("CrossEntropyLoss", (2, 3), torch.tensor([0.5, 1.0]), "0.5"),
        (lambda o, y: 3.0, (2, 3), torch.zeros(2), "tensor"),
        (lambda o, y=None: o, (2, 3), torch.zeros(2), "outputs"),
        (lambda o, y: o[:1, 0], (2, 3), torch.zeros(2), r"\(1,\).*\b2 rows"),
    ],
)
def test_losses_that_cannot_be_computed(
    given: Any, output: tuple[int, ...], label: Tensor, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        loss_of(given, torch.zeros(output), label)


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
    counted: list[Any] = []
    hooks = [  # as of an average of weights, or a counter: for steps that count
        register(lambda *given: counted.append(given))
        for register in (
            other_optimizer.register_step_pre_hook,
            other_optimizer.register_step_post_hook,
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
        )
    ]
    try:
        restored.build_optimizers(trained)
        assert not counted
        other_optimizer.zero_grad()
        other_optimizer.step()
        assert len(counted) == len(hooks)
    finally:
        for hook in hooks:
            hook.remove()
    restored.check_same(described, "there")
    restored.restore(kept)
    step(again, other_optimizer, 1)
    for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("used", [(1, 2), ()], ids=["others", "none"])
def test_a_rank_whose_rows_used_other_weights_goes_on_with_its_own_moments(
    used: tuple[int, ...],
) -> None:
    def made(used: tuple[int, ...]) -> Any:
        trainee: Any = object.__new__(TorchTrainee)
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        (optimizer,) = make_optimizers(TorchModel(net, "MSELoss", "Adam"), net).values()
        for number in used:  # as by experts that only some rows reach
            for parameter in net[number].parameters():
                parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
        trainee.module, trainee.variables = net, TorchVariables(net, [optimizer])
        trainee.optimizer, trainee._device = optimizer, torch.device("cpu")
        return trainee

    sync: Any = LocalSGDSynchroniser(DiLoCo(every=2), SimpleNamespace(size=2))
    first, second = made((0, 1)), made(used)
    kept = capture_rank(second, Hooks(), sync, rank=1, in_epoch=False)
    again = made(())
    again.variables.build_optimizers(first.variables.trained_by())  # and rank 0's values
    again.variables.restore(first.variables.capture())
    restore_rank(RankState(json.loads(json.dumps(kept.values)), kept.arrays), again, Hooks(), sync)
    for ours, theirs in zip(again.module.parameters(), second.module.parameters(), strict=True):
        own, kept_ones = again.optimizer.state.get(ours), second.optimizer.state.get(theirs)
        assert str(own) == str(kept_ones)


def test_numbers_that_an_optimizer_keeps_are_kept_whole() -> None:
    (parameter,) = parameters = [nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    held = optimizer.state[parameter]
    held.update(scale=0.1, step=3, ratio=0)
    module = nn.Module()
    module.weight = parameter
    variables = TorchVariables(module, [optimizer])
    kept = variables.capture()
    held.update(scale=1 / 3, step=4, ratio=0.25)  # which had been a whole number
    kept = variables.capture(kept)
    held.update(scale=0.0, step=0, ratio=0.0)
    variables.restore(kept)
    assert held == {"scale": 1 / 3, "step": 4, "ratio": 0.25}


def test_weights_that_lie_otherwise_in_memory_are_those_of_rank_0() -> None:
    def weights(value: float) -> TorchVariables:
        net = nn.Conv2d(3, 4, 3)
        nn.init.constant_(net.weight, value)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return TorchVariables(net, [])

    sent = [np.full((4, 3, 3, 3), 7, np.float32), np.zeros(4, np.float32)]
    world: Any = SimpleNamespace(
        Get_size=lambda: 2,
        Get_rank=lambda: 1,
        Bcast=lambda buffer, root: np.copyto(buffer, sent.pop(0).reshape(-1).view(np.uint8)),
    )
    own = weights(3.0)
    broadcast(own, world)
    assert (np.asarray(own.named["model/00000"].numpy()) == 7.0).all()


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
    def made() -> tuple[Any, Schedulers, NamedStates]:
        model = TorchModel(NET, "MSELoss", functools.partial(torch.optim.SGD, lr=0.1), make)
        optimizers = make_optimizers(model, NET)
        optimizer = optimizers[""]
        schedulers = Schedulers(model, optimizers)
        held = {"settings": OptimizerSettings([optimizer]), **schedulers.by_name}
        return optimizer, schedulers, NamedStates(held, {}, lone_world())

    optimizer, schedulers, states = made()
    for _ in range(2):
        optimizer.step()
        schedulers.after_epoch({"loss": 1.0})
    packed, arrays = states.capture()
    again, others, restored = made()
    restored.restore(json.loads(json.dumps(packed)), arrays)
    for loss in (1.0, 0.5, 0.5, 0.5):
        for one, each in ((optimizer, schedulers), (again, others)):
            one.step()
            each.after_epoch({"loss": loss})
        assert settings_of(again) == settings_of(optimizer)


def test_bfloat16_goes_through_numpy_as_it_is() -> None:
    tensor = torch.randn(5).to(torch.bfloat16)
    array = as_array(tensor)
    assert array.dtype.name == "bfloat16"
    other = torch.zeros(5, dtype=torch.bfloat16)
    set_tensor(other, array)
    assert torch.equal(other, tensor)
