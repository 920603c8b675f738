"""Models as users write them: built before the first step, or refused by name."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

from horovod_spark_runner import Allreduce, AsyncServer, DiLoCo, LocalSGD
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.keras.binding import _class_weights, input_structure
from horovod_spark_runner.engines.keras.exchange import TensorCollectives
from horovod_spark_runner.engines.keras.model import call_outputs
from horovod_spark_runner.engines.keras.trainee import _BuiltModel, _check_between_meetings
from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.sync.allreduce import AllreduceSynchroniser
from horovod_spark_runner.sync.asynchronous import AsyncSynchroniser
from horovod_spark_runner.sync.local_sgd import LocalSGDSynchroniser
from horovod_spark_runner.training.spec import Binding
from tests.runs import source, spec_of

X, Y, Z = Column("x", "float32", (3,)), Column("y", "float32", ()), Column("z", "float32", ())
A, B = Column("a", "float32", (2,)), Column("b", "float32", (3,))
WORD = Column("word", "string", ())
FEATURE, LABEL = Binding(("x",)), Binding(("y",))
layers = keras.layers


def build(
    make: Any,
    features: Binding = FEATURE,
    labels: Binding = LABEL,
    **fields: Any,
) -> _BuiltModel:
    hvd.init()
    columns = (X, Y, Z, A, B, WORD)
    spec = spec_of(columns, model=source(make), inputs=features, outputs=labels, **fields)
    way: Any = fields.get("sync")
    shared = TensorCollectives()
    rounds = isinstance(way, LocalSGD | DiLoCo)
    sync: Any = (
        LocalSGDSynchroniser(way, shared) if rounds else AllreduceSynchroniser("none", shared)
    )
    return _BuiltModel(spec, MPI.COMM_WORLD, sync, share_logs=False)


def constrained() -> keras.Model:
    kernel = keras.constraints.NonNeg()
    return keras.Sequential([layers.Input((3,)), layers.Dense(1, kernel_constraint=kernel)])


@pytest.mark.parametrize(
    ("model", "steps", "message"),
    [
        (constrained, 1, r"'[^']*kernel'.*constraint.*sync=Allreduce\(\)"),
        (lambda: keras.Sequential([layers.Input((3,))]), 4, "steps_per_execution=4"),
    ],
    ids=["constraint", "steps_per_execution"],
)
def test_what_ranks_that_step_by_themselves_cannot_do_is_refused(
    model: Any, steps: int, message: str
) -> None:
    made = model()
    made.compile("sgd", "mse", steps_per_execution=steps)
    hvd.init()
    ranks: Any = SimpleNamespace(rank=0, size=2)
    sync = AsyncSynchroniser(AsyncServer(), TensorCollectives(), ranks)
    with pytest.raises(ModelError, match=f"(?i){message}"):
        _check_between_meetings(made, [made.optimizer], sync, AsyncServer())
    allreduce = AllreduceSynchroniser("none", TensorCollectives())
    _check_between_meetings(made, [made.optimizer], allreduce, Allreduce())


@pytest.mark.parametrize("way", [LocalSGD(every=2), DiLoCo(every=2)], ids=str)
def test_constraints_that_a_meeting_would_break_are_refused(way: Any) -> None:
    hvd.init()
    made = constrained()
    made.compile("sgd", "mse")
    rounds = LocalSGDSynchroniser(way, TensorCollectives())
    with pytest.raises(ModelError, match=f"kernel'.*NonNeg.*sync={type(way).__name__}"):
        _check_between_meetings(made, [made.optimizer], rounds, way)


def test_one_rank_makes_an_outer_step_too() -> None:
    def model() -> keras.Model:
        made = constrained()
        made.compile("sgd", "mse")
        return made

    build(model, sync=LocalSGD(every=2))
    with pytest.raises(ModelError, match="sync=DiLoCo"):
        build(model, sync=DiLoCo(every=2))


@pytest.mark.parametrize("average", [False, True])
def test_loss_scales_of_ranks_have_no_mean(average: bool) -> None:
    hvd.init()
    made = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    made.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    way = LocalSGD(every=2, average_optimizer=average)
    rounds = LocalSGDSynchroniser(way, TensorCollectives())
    message = "average_optimizer.*loss scale"
    refused = pytest.raises(ModelError, match=message) if average else contextlib.nullcontext()
    with refused:
        _check_between_meetings(made, [made.optimizer], rounds, way)


def rows(count: int = 4) -> dict[str, np.ndarray]:
    """Return rows in which every column has another value."""
    columns = {"x": (3,), "y": (), "z": (), "a": (2,), "b": (3,)}
    return {
        name: np.full((count, *shape), number, np.float32)
        for number, (name, shape) in enumerate(columns.items(), start=1)
    }


def values(structure: Any) -> Any:
    """Return the structure with the number that each of its arrays is full of."""
    return keras.tree.map_structure(
        lambda v: None if v is None else float(np.ravel(v)[0]), structure
    )


class Dense(keras.Model):
    """A subclassed network with one output."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.dense = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


class Pair(Dense):
    """One that takes two inputs by place."""

    def call(self, inputs: Any) -> Any:
        p, q = inputs
        return self.dense(layers.concatenate([p, q]))


class Named(Dense):
    """One that takes two inputs by name."""

    def call(self, inputs: Any) -> Any:
        return self.dense(layers.concatenate([inputs["p"], inputs["q"]]))


class Callless(Dense):
    """One that its own ``train_step`` alone knows how to use."""

    call = keras.Model.call

    def train_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self.dense(x) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def compiled(model: Any, loss: Any = "mse", **more: Any) -> Any:
    model.compile(**{"optimizer": "adam", "loss": loss, **more})
    return model


def sequential(shape: tuple[int, ...] | None = None, **more: Any) -> Any:
    begin = [] if shape is None else [keras.Input(shape)]
    return compiled(keras.Sequential([*begin, layers.Dense(1)]), **more)


@pytest.mark.parametrize(
    "make",
    [lambda: compiled(Dense()), sequential, lambda: compiled(Callless(), None)],
    ids=["subclassed", "sequential without Input", "without call"],
)
def test_what_a_model_lacks_is_made_before_the_first_step(make: Any) -> None:
    built = build(make)
    assert [tuple(w.shape) for w in built.model.weights] == [(3, 1), (1,)]
    (optimizer,) = built.optimizers
    assert optimizer.built
    assert len(optimizer.variables) >= 6  # the moments of both weights
    for weight in optimizer._momentums:
        np.testing.assert_array_equal(weight, np.zeros(weight.shape))


def test_building_leaves_no_trace_of_the_row_it_was_done_with() -> None:
    def make() -> Any:
        keras.utils.set_random_seed(5)
        return compiled(sequential((3,)), metrics=["mae"])

    built = build(make)
    assert int(built.model.optimizer.iterations) == 0
    totals = [float(np.sum(v)) for m in built.model.metrics for v in m.variables]
    assert totals == [0.0] * 4  # a sum and a count each of the loss and of the metric
    for ours, theirs in zip(built.model.get_weights(), make().get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_optimizers_made_in_the_first_step_are_known() -> None:
    class Late(Callless):
        def train_step(self, data: Any) -> Any:
            if not hasattr(self, "tools"):
                self.tools = type("Tools", (), {})()  # where nobody would look
                self.tools.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            self.optimizer, given = self.tools.optimizer, self.optimizer
            try:
                return super().train_step(data)
            finally:
                self.optimizer = given

    built = build(lambda: compiled(Late(), None))
    assert [type(optimizer).__name__ for optimizer in built.optimizers] == ["Adam", "SGD"]
    assert built.optimizers[1].built


@pytest.mark.parametrize("given", ["auto", True])
def test_xla_is_switched_off(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from keras.src.trainers import trainer

    monkeypatch.setattr(trainer, "model_supports_jit", lambda model: True)
    assert build(lambda: sequential((3,), jit_compile=given)).model.jit_compile is False


def under_a_strategy() -> Any:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return sequential((3,))


def overriding(name: str) -> Any:
    return compiled(type("Own", (Dense,), {name: lambda self, *a, **k: None})())


def stateful() -> Any:
    lstm = layers.LSTM(2, stateful=True)
    return compiled(
        keras.Sequential([keras.Input(batch_shape=(4, 3)), layers.Reshape((3, 1)), lstm])
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (under_a_strategy, "tf.distribute"),
        (lambda: overriding("fit"), r"Own.*\bfit\(\)"),
        (lambda: overriding("evaluate"), r"Own.*\bevaluate\(\)"),
        (lambda: overriding("make_train_function"), r"Own.*make_train_function\(\)"),
        (stateful, "stateful"),
        (
            lambda: compiled(keras.Sequential([keras.Input(batch_shape=(8, 3)), layers.Dense(1)])),
            r"\b8 rows.*batch_size.*\b4",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(make)


def test_strings_for_numbers_are_refused() -> None:
    with pytest.raises(ModelError, match="'word'.*string.*keras"):
        build(lambda: sequential((1,)), Binding(("word",)))

    def of_words() -> Any:
        words = keras.Input((), dtype="string")
        return compiled(keras.Model(words, layers.StringLookup(vocabulary=["a"])(words)))

    with pytest.raises(ModelError, match="string.*'y'.*string"):
        build(of_words, Binding(("y",)), Binding(("z",)))


# -- columns as inputs --------------------------------------------------------------------------


def two_inputs(named: bool, as_dictionary: bool) -> Any:
    """A functional model of two inputs whose alphabetical order is not that of its columns."""
    p = keras.Input((3,), name="q_layer" if named else None)
    q = keras.Input((2,), name="p_layer" if named else None)
    inputs = {"second": p, "first": q} if as_dictionary else [p, q]
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.concatenate([p, q]))))


def test_unnamed_inputs_take_columns_in_their_order() -> None:
    data = build(lambda: two_inputs(False, False), Binding(("b", "a"))).batches.data(rows())
    assert [tuple(part.shape) for part in data[0]] == [(4, 3), (4, 2)]
    assert values(data[0]) == (5.0, 4.0)


def test_a_dictionary_of_inputs_is_bound_by_keys_or_names_but_not_by_order() -> None:
    with pytest.raises(ModelError, match=r"keys.*\['first', 'second'\]"):
        build(lambda: two_inputs(True, True), Binding(("b", "a")))
    for names in (("second", "first"), ("q_layer", "p_layer")):
        built = build(lambda: two_inputs(True, True), Binding(("b", "a"), names))
        assert values(built.batches.data(rows())[0]) == {"second": 5.0, "first": 4.0}


def test_joined_columns_are_one_input_in_the_order_given() -> None:
    built = build(lambda: sequential((4,)), Binding((("x", "y"),)))
    np.testing.assert_array_equal(built.batches.data(rows())[0][0], [1, 1, 1, 2])
    built = build(lambda: sequential((4,)), Binding((("y", "x"),)))
    np.testing.assert_array_equal(built.batches.data(rows())[0][0], [2, 1, 1, 1])


def test_subclasses_take_tuples_by_place_and_dictionaries_by_name() -> None:
    built = build(lambda: compiled(Pair()), Binding(("b", "a")))
    assert values(built.batches.data(rows())[0]) == (5.0, 4.0)
    built = build(lambda: compiled(Named()), Binding(("b", "a"), ("q", "p")))
    assert values(built.batches.data(rows())[0]) == {"q": 5.0, "p": 4.0}


def test_a_sequential_model_that_was_never_called_has_inputs_and_outputs() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    inputs, outputs = input_structure(model), call_outputs(model, None)
    assert inputs is not None
    assert inputs.shape == (None, 3)
    assert outputs is not None
    assert outputs.shape == (None, 2)


# -- columns as labels --------------------------------------------------------------------------


def two_outputs(loss: Any, as_dictionary: bool = True) -> Any:
    """Outputs called ``reg`` and ``cls``, in this order, from layers of other names."""
    inputs = keras.Input((3,))
    reg, cls = layers.Dense(1, name="one")(inputs), layers.Dense(1, name="two")(inputs)
    outputs = {"reg": reg, "cls": cls} if as_dictionary else [reg, cls]
    return compiled(keras.Model(inputs, outputs), loss)


BOTH = {"reg": "mse", "cls": "mae"}


def test_a_dictionary_of_outputs_learns_each_its_own_label() -> None:
    with pytest.raises(ModelError, match=r"keys.*\['cls', 'reg'\]"):
        build(lambda: two_outputs(BOTH), labels=Binding(("y", "z")))
    built = build(lambda: two_outputs(BOTH), labels=Binding(("y", "z"), ("reg", "cls")))
    _, labels = built.batches.data(rows())
    assert values(labels) == {"reg": 2.0, "cls": 3.0}
    # As far as Keras itself is concerned: the loss with these labels is what one would compute.
    data = rows()
    outputs = built.model(data["x"])
    expected = np.mean((outputs["reg"] - 2) ** 2) + np.mean(np.abs(outputs["cls"] - 3))
    loss = built.model.compute_loss(y=labels, y_pred=outputs)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_outputs_by_layer_names() -> None:
    built = build(lambda: two_outputs(BOTH), labels=Binding(("y", "z"), ("one", "two")))
    assert values(built.batches.data(rows())[1]) == {"reg": 2.0, "cls": 3.0}


def test_an_output_without_a_loss_needs_no_label() -> None:
    built = build(lambda: two_outputs({"reg": "mse"}), labels=Binding(("y",), ("reg",)))
    assert values(built.batches.data(rows())[1])["reg"] == 2.0
    with pytest.raises(ModelError, match="'cls'.*label"):
        build(lambda: two_outputs(BOTH), labels=Binding(("y",), ("reg",)))


def test_one_label_may_stand_for_two_outputs_and_be_a_feature() -> None:
    built = build(lambda: two_outputs(BOTH), labels=Binding(("y", "y"), ("reg", "cls")))
    assert values(built.batches.data(rows())[1]) == {"reg": 2.0, "cls": 2.0}

    def autoencoder() -> Any:
        return compiled(keras.Sequential([keras.Input((3,)), layers.Dense(3)]))

    built = build(autoencoder, labels=Binding(("x",)))
    x, y = built.batches.data(rows())
    np.testing.assert_array_equal(x, y)
    assert built.batches.columns == ["x"]


def test_no_label_is_refused_where_there_is_a_loss_to_compare_it() -> None:
    with pytest.raises(ModelError, match="label_cols.*loss"):
        build(lambda: sequential((3,)), labels=Binding(()))
    built = build(lambda: compiled(Callless(), None), labels=Binding(()))
    assert tuple(built.batches.data(rows()).shape) == (4, 3)  # as fit passes it on
    assert build(lambda: compiled(Callless(), "mse"), labels=Binding(())).optimizers


def test_classes_have_weights_whether_by_number_or_one_hot() -> None:
    weights = {0: 2.0, 2: 0.5}
    expected = [2.0, 1.0, 0.5, 2.0]
    numbers = np.array([0, 1, 2, 0])
    for labels in (numbers, numbers[:, None], numbers.astype(np.float32), np.eye(3)[numbers]):
        np.testing.assert_array_equal(np.ravel(_class_weights(labels, weights)), expected)
    # Row by row, as Keras does it: a label of shape (rows, 1) weighs rows as one of (rows,).
    assert _class_weights(np.eye(3)[numbers], weights).shape == (4,)


def test_columns_that_the_only_input_cannot_take_one_by_one() -> None:
    """A network without an input says so when it is called; one that joins them may be meant."""

    def dense(*first: Any) -> Any:
        model = keras.Sequential([*first, layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ModelError, match=r"feature_cols.*\b2\b.*=\[\['a', 'b'\]\]"):
        build(dense, Binding(("a", "b")))
    assert build(lambda: dense(layers.Concatenate()), Binding(("a", "b"))).model.built


OF_NO_MODEL = keras.metrics.Mean(name="of_no_model")


class Keeping(Dense):
    """One whose step changes what Keras knows, and reads what it does not."""

    def __init__(self) -> None:
        import tensorflow as tf

        super().__init__()
        self.scale = tf.Variable(2.0)
        self.centre = self.add_weight(shape=(), trainable=False)
        self.noise = keras.random.SeedGenerator(1)
        self.seen = keras.metrics.Mean(name="seen")

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        x = x * self.scale + keras.random.normal(tf.shape(x), seed=self.noise)
        x += keras.random.normal(tf.shape(x)) + tf.random.get_global_generator().normal(())
        self.centre.assign(tf.reduce_mean(x))
        self.seen.update_state(x)
        return super().train_step((x, y))


class Tracking(Dense):
    """As Keras' documentation of ``compute_loss`` has it: ``metrics`` are the model's own."""

    def __init__(self) -> None:
        super().__init__(name="tracking")
        self.own = keras.metrics.Mean(name="own")

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(*given, **named)
        self.own.update_state(loss)
        return loss

    @property
    def metrics(self) -> Any:
        return [self.own]


class Around(Dense):
    """One that trains a model within it, which is compiled by itself."""

    def __init__(self) -> None:
        super().__init__(name="around")
        self.inner = compiled(Dense(name="inner"), metrics=["mae"])

    def train_step(self, data: Any) -> Any:
        return self.inner.train_step(data)


class Losing(Dense):
    """One whose step changes what Keras does not know."""

    def __init__(self) -> None:
        import tensorflow as tf

        super().__init__(name="losing")
        self.centre = tf.Variable(0.0)
        self.kept = [{"last": tf.Variable(0.0)}]
        self.noise = tf.random.Generator.from_seed(1)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        x += self.noise.normal(tf.shape(x))
        tf.function(lambda: self.centre.assign(1.0))()
        tf.cond(tf.size(x) > 9, lambda: self.kept[0]["last"].assign(1.0), lambda: 0.0)
        OF_NO_MODEL.update_state(x)
        return super().train_step((x, y))


def test_what_a_step_changes_is_known_to_keras_or_refused() -> None:
    for model in (Keeping, Tracking, Around):
        build(lambda model=model: compiled(model(), metrics=["mae"]))
    named = ".*".join(f"'{name}'.*'losing'" for name in ("centre", "noise"))
    named += ".*'Variable'.*'of_no_model/count'.*'of_no_model/total'"
    with pytest.raises(ModelError, match=f"{named}.*Keras.*add_weight"):
        build(lambda: compiled(Losing()))
