"""What the exchange of a Keras model hands to the way of synchronising, by one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_spark_runner import ModelError, PowerSGD, Threshold, TopK
from horovod_spark_runner.engines.keras.exchange import Part, TensorCollectives, sum_over_ranks
from horovod_spark_runner.engines.keras.step import DistributedStep
from horovod_spark_runner.sync import allreduce
from horovod_spark_runner.sync.allreduce import AllreduceSynchroniser
from horovod_spark_runner.sync.compressed import CompressedSynchroniser
from horovod_spark_runner.sync.mpi import MpiWire

WORDS = np.array([[1, 4], [4, 2]])
NOTHING = tf.zeros(3)


class Taught(keras.Model):
    """A table of words; what is done with its gradients is said by a function."""

    def __init__(self, teach: Callable[[Any, list[Any]], None]) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(6, 3)
        self.first, self.second = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.25)
        self.compile(self.first)
        self.teach = teach
        self.count = 0
        self.table.build(None)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self.table(data)))
        gradients = tape.gradient(loss, [v.value for v in self.trainable_variables])
        self.teach(self, gradients)
        self.count += 1
        return {"loss": loss}


class Noting(AllreduceSynchroniser):
    """Plain allreduce that notes for which place gradients came."""

    def __init__(self) -> None:
        super().__init__("none", TensorCollectives())
        self.places: list[str] = []

    def gradients(
        self, gradients: Any, share: Any, name: str, place: str, along: Sequence[Any] = ()
    ) -> Any:
        self.places.append(place)
        return super().gradients(gradients, share, name, place, along)


@pytest.fixture(autouse=True, scope="module")
def world() -> None:
    hvd.init()


def alternate(model: Any, gradients: list[Any]) -> None:
    chosen = model.first if model.count % 2 else model.second
    chosen.apply(gradients, model.trainable_variables)


def test_an_optimizer_has_the_same_place_whichever_comes_first() -> None:
    found = []
    for begin in (0, 1):
        model = Taught(alternate)
        model.count = begin
        noting = Noting()
        exchange = DistributedStep(model, noting)
        for _ in range(2):
            exchange.step(tf.constant(WORDS), NOTHING)
        found.append(noting.places)
    assert found == [["1.0", "0.0"], ["0.0", "1.0"]]


def of_unknown_shape(gradients: list[Any]) -> list[Any]:
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
    return [tf.numpy_function(lambda g: 2 * g, [g], g.dtype) for g in dense]


WAYS = ["none", "bf16", TopK(ratio=0.1), Threshold(), PowerSGD()]


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("built", [True, False])
def test_gradients_whose_shape_only_the_step_knows_have_that_of_their_variable(
    way: Any, built: bool
) -> None:
    def teach(model: Any, gradients: list[Any]) -> None:
        variables = [] if built else [model.trainable_variables]
        model.first.apply(of_unknown_shape(gradients), *variables)

    model = Taught(teach)
    if built:
        model.first.build(model.trainable_variables)
    before = model.table.get_weights()[0]
    shared = TensorCollectives()
    sync = (
        AllreduceSynchroniser("none", shared)
        if way == "none"
        else CompressedSynchroniser(way, shared, MpiWire())
    )
    exchange = DistributedStep(model, sync)
    tf.function(exchange.step)(tf.constant(WORDS), NOTHING)
    expected = before.copy()
    for word in WORDS.ravel():  # 2 · the gradient of a square, at half the rate
        expected[word] -= 2 * before[word]
    np.testing.assert_allclose(model.table.get_weights()[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "teach",
    [
        lambda model, gradients: model.first.apply(gradients * 2, model.trainable_variables),
        lambda model, gradients: model.first.apply(gradients),
    ],
    ids=["too_many", "not_built"],
)
def test_gradients_of_no_variable_are_refused(teach: Any) -> None:
    exchange = DistributedStep(Taught(teach), Noting())
    with pytest.raises(ModelError, match=r"\d gradients.*\d variables"):
        exchange.step(tf.constant(WORDS), NOTHING)


def test_no_gradients_are_none() -> None:
    noting = Noting()
    model = Taught(lambda model, gradients: model.first.apply([], []))
    DistributedStep(model, noting).step(tf.constant(WORDS), NOTHING)
    assert noting.places == ["0.0"]


def test_gradients_of_another_trace_of_a_step_are_not_mistaken() -> None:
    sync = CompressedSynchroniser("bf16", TensorCollectives(), MpiWire())

    @tf.function
    def reduced(*gradients: Any) -> Any:
        return sync.gradients(gradients, Part(1), "gradients", "0.0")[0]

    some = [tf.ones((2, 3)), tf.zeros(4)]
    for given in (some, some[::-1], some):
        for ours, gradient in zip(reduced(*given), given, strict=True):
            np.testing.assert_array_equal(ours, gradient)


@pytest.mark.parametrize(
    ("hosts", "compiled", "expected"),
    [
        (2, True, [["c", "d"], ["b"], ["a"]]),
        (1, True, [["a", "b", "c", "d"]]),
        (2, False, [["a", "b", "c", "d"]]),
    ],
    ids=["hosts", "one_host", "eager"],
)
def test_gradients_leave_in_the_order_of_the_backward_pass_where_it_pays(
    hosts: int, compiled: bool, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group after the other; each is twice this rank's own, as of two ranks that are alike."""
    monkeypatch.setattr(hvd, "size", lambda: 2)
    monkeypatch.setattr(hvd, "local_size", lambda: 2 // hosts)
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 4000)
    groups: list[list[int]] = []
    waits: list[int] = []

    def grouped_allreduce(tensors: Any, *, name: str, **_: Any) -> list[Any]:
        groups.append([int(tensor.shape[0]) for tensor in tensors])
        doubled = [tf.add_n([tensor, tensor]) for tensor in tensors]
        waits.append(len(doubled[0].op.control_inputs) if compiled else 0)
        return doubled

    monkeypatch.setattr(hvd, "grouped_allreduce", grouped_allreduce)
    sizes = {"a": 1500, "b": 1001, "c": 3, "d": 999}
    summed = functools.partial(sum_over_ranks, name="gradients.1")
    function = tf.function(summed) if compiled else summed
    found = function([tf.range(float(size)) for size in sizes.values()])
    assert groups == [[sizes[name] for name in group] for group in expected]
    assert [bool(count) for count in waits] == [bool(n) for n in range(len(expected))]
    for tensor, size in zip(found, sizes.values(), strict=True):
        np.testing.assert_array_equal(tensor, 2.0 * np.arange(size))
