"""Programs with Horovod's Keras API, as ranks run them; each compares itself with plain Keras."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

ROWS = 32


def run(names: tuple[str, ...], folder: str) -> dict[str, Any]:
    """Run cases by their names; return what they return."""
    hvd.init()
    assert hvd.size() == 2
    return {name: globals()[name](Path(folder)) for name in names}


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Return all rows, in an order in which a rank's half of each batch is every other row."""
    drawn = np.random.default_rng(5)
    features = drawn.normal(size=(ROWS, 4)).astype("float32")
    return features, (features @ [[1.0], [-2.0], [0.5], [3.0]]).astype("float32")


def own_rows() -> tuple[np.ndarray, np.ndarray]:
    features, labels = rows()
    return features[hvd.rank() :: 2], labels[hvd.rank() :: 2]


def dense_model(seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.layers.Input((4,)), *layers])


def fit(
    optimizer: Any, *, model: Any = None, whole: bool = False, batch: int = 8, **options: Any
) -> keras.Model:
    """Train on this rank's half of each batch of ``batch`` rows, or on whole ones."""
    model = model or dense_model()
    model.compile(optimizer, "mse")
    data = rows() if whole else own_rows()
    options = {"epochs": 3, "verbose": 0, "shuffle": False, **options}
    model.fit(*data, batch_size=batch if whole else batch // 2, **options)
    return model


def assert_same(ours: keras.Model, expected: keras.Model, tolerance: float = 1e-6) -> None:
    for one, other in zip(ours.weights, expected.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), tolerance, tolerance)


def assert_equal_on_ranks(variables: list[Any]) -> None:
    values = hvd_tf.allgather_object([np.array(variable) for variable in variables])
    for one, other in zip(*values, strict=True):
        np.testing.assert_array_equal(one, other)


def script(folder: Path) -> None:
    """The program of Horovod's and Databricks' pages, with layers that have no variables yet."""
    features, labels = own_rows()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adadelta(1.0 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=2.0, warmup_epochs=2, verbose=1),
        keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(folder / "script-{epoch}.keras")))
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).repeat().shuffle(32).batch(4)
    history = model.fit(
        dataset, steps_per_epoch=4, epochs=3, callbacks=callbacks, validation_data=rows(),
        verbose=1 if hvd.rank() == 0 else 0,
    ).history  # fmt: skip
    assert_equal_on_ranks([*model.weights, *optimizer.variables])
    one, other = hvd_tf.allgather_object(history)
    assert one == other
    assert len(history["val_mae"]) == 3
    assert sorted(path.name for path in folder.glob("script-*")) == [
        f"script-{epoch}.keras" for epoch in (1, 2, 3)
    ]


def optimizers(folder: Path) -> None:
    """Every argument that changes what is summed up, or how."""
    made: dict[str, Callable[[], Any]] = {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(0.05),
        "clipped": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.3, use_ema=True),
    }
    for name, make in made.items():
        expected = fit(make(), whole=True)
        optimizer = make()
        ours = fit(hvd.DistributedOptimizer(optimizer))
        assert isinstance(ours.optimizer, type(make())), name
        assert_same(ours, expected)
        assert_equal_on_ranks([*ours.weights, *optimizer.variables])

    expected = fit(keras.optimizers.SGD(0.1), whole=True)
    for options in (
        {"groups": 2}, {"num_groups": 1}, {"gradient_predivide_factor": 2.0}, {"name": "mine"},
    ):  # fmt: skip
        assert_same(fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)), expected)
    model = dense_model()
    pairs = [list(model.layers[1].weights), [model.layers[0].bias]]
    grouped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=pairs)
    assert_same(fit(grouped, model=model), expected)
    half = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16)
    assert_same(fit(half), expected, 1e-2)
    summed = fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), op=hvd.Sum))
    assert_same(summed, expected)
    eager = dense_model()
    eager.compile(hvd_tf.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    eager.fit(*own_rows(), batch_size=4, epochs=3, shuffle=False, verbose=0)
    assert_same(eager, expected)
    # Again, as a cell that is run twice does.
    twice = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), op=hvd.Sum)
    assert_same(fit(hvd.DistributedOptimizer(twice, op=hvd.Sum)), expected)
    compiled = dense_model()
    compiled.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True,
        steps_per_execution=2,
    )  # fmt: skip
    compiled.fit(*own_rows(), batch_size=4, epochs=3, shuffle=False, verbose=0)
    assert_same(compiled, expected)


def accumulation(folder: Path) -> None:
    """Gradients of two passes in one step: of their mean, and of their sum."""
    for average in (True, False):
        for make in (keras.optimizers.SGD, keras.optimizers.Adam):
            rate = 0.04
            theirs = make(rate if average or make is keras.optimizers.Adam else 2 * rate)
            expected = fit(theirs, whole=True, batch=16)
            optimizer = hvd.DistributedOptimizer(
                make(rate), backward_passes_per_step=2, average_aggregated_gradients=average
            )
            ours = fit(optimizer, batch=8)
            # Adam's epsilon counts for less beside a sum.
            assert_same(ours, expected, 1e-6 if average or make is keras.optimizers.SGD else 1e-4)
            assert int(optimizer.iterations) == 6
    # Keras' own accumulation, which takes the mean.
    own = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    expected = fit(keras.optimizers.SGD(0.1), whole=True, batch=16)
    assert_same(fit(hvd.DistributedOptimizer(own), batch=8), expected)


def sparse_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(7, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.layers.Input((2,), dtype="int32"), *layers])


def sparse_rows() -> tuple[np.ndarray, np.ndarray]:
    words = np.random.default_rng(3).integers(0, 7, (ROWS, 2)).astype("int32")
    return words, words.sum(1, keepdims=True).astype("float32")


def custom_loop(folder: Path) -> None:
    """Tapes, in eager mode and compiled, over dense and sparse gradients."""
    words, labels = sparse_rows()

    def train(tape_of: Callable[[Any], Any], start: int, step: int, compiled: bool) -> Any:
        model, optimizer = sparse_model(), keras.optimizers.Adam(0.05)

        def update(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            tape = tape_of(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        update = tf.function(update) if compiled else update
        for first in range(0, ROWS, 8):
            batch = slice(first + start, first + 8, step)
            update(tf.constant(words[batch]), tf.constant(labels[batch]))
        return model

    expected = train(lambda tape: tape, 0, 1, True)
    for options in ({}, {"sparse_as_dense": True}, {"groups": 2}):
        for compiled in (True, False):
            distributed = functools.partial(hvd_tf.DistributedGradientTape, **options)
            ours = train(distributed, hvd.rank(), 2, compiled)
            if "sparse_as_dense" not in options:  # Keras squares each slice of a row by itself
                assert_same(ours, expected, 1e-5)
            assert_equal_on_ranks(ours.weights)
    model = sparse_model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(words[:4])) * (hvd.rank() + 1)
    tape = hvd_tf.DistributedGradientTape(tape)
    sources = {"bias": model.layers[-1].bias, "all": [model.layers[-1].kernel]}
    np.testing.assert_allclose(tape.gradient(loss, sources)["bias"], [6.0])
    # An optimizer of sparse gradients.
    for make in (keras.optimizers.SGD, keras.optimizers.Adam):
        expected, ours = sparse_model(), sparse_model()
        expected.compile(make(0.05), "mse")
        expected.fit(words, labels, batch_size=8, shuffle=False, verbose=0)
        ours.compile(hvd.DistributedOptimizer(make(0.05)), "mse")
        mine = slice(hvd.rank(), None, 2)
        ours.fit(words[mine], labels[mine], batch_size=4, shuffle=False, verbose=0)
        assert_same(ours, expected, 1e-5)
    passes = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), backward_passes_per_step=2, sparse_as_dense=True
    )
    ours = sparse_model()
    ours.compile(passes, "mse")
    ours.fit(words[hvd.rank() :: 2], labels[hvd.rank() :: 2], batch_size=4, verbose=0)
    assert_equal_on_ranks(ours.weights)


class Noted(keras.callbacks.Callback):
    """Notes the learning rate and the velocity of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


def callbacks(folder: Path) -> None:
    """Starts that differ, metrics, and learning rates as Horovod's pages define them."""
    # Other weights, an optimizer that is ahead, and layers numbered otherwise on rank 1.
    expected = fit(keras.optimizers.SGD(0.05, momentum=0.9), whole=True)
    if hvd.rank() == 1:
        dense_model(9)
    model = dense_model(1 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    if hvd.rank() == 1:
        optimizer.build(model.trainable_variables)
        for variable in optimizer.momentums:
            variable.assign(variable + 3.0)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    averaged = hvd.callbacks.MetricAverageCallback()
    trained = fit(optimizer, model=model, callbacks=[broadcast, averaged], validation_data=rows())
    assert_same(trained, expected)
    assert_equal_on_ranks([*trained.weights, *optimizer.variables])
    logs = {"loss": 1.0 + hvd.rank(), "acc": 3.0 * hvd.rank()}
    averaged.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "acc": 1.5}

    # A variable that stays each rank's.
    model = dense_model(1 + hvd.rank())
    for layer in model.layers:
        layer.trainable = False
    before = [weight.numpy() for weight in model.weights]
    local = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[model.weights[0]])
    fit(keras.optimizers.SGD(0.1), model=model, callbacks=[local], epochs=1)
    np.testing.assert_array_equal(model.weights[0].numpy(), before[0])
    np.testing.assert_array_equal(model.weights[2].numpy(), dense_model(2).weights[2].numpy())

    # Two epochs of warm-up, one at full rate, then a tenth: four steps each.
    noted = Noted()
    scheduled = [
        hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.2, 0.1, start_epoch=3, end_epoch=4),
        hvd.callbacks.LearningRateScheduleCallback(0.2, lambda epoch: epoch / 10, start_epoch=4),
        noted,
    ]
    history = fit(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), callbacks=scheduled, epochs=6
    ).history.history
    warm = [0.1 * (1 + step / 8) for step in range(1, 9)]
    np.testing.assert_allclose(
        noted.rates, [*warm, *[0.2] * 4, *[0.2] * 4, *[0.08] * 4, *[0.1] * 4], 1e-6
    )
    np.testing.assert_allclose(history["lr"], [0.15, 0.2, 0.2, 0.2, 0.08, 0.1], 1e-6)

    # Velocity is what it would be had it been added up at the new rate: as one process does it.
    features, labels = rows()
    model, velocities, rate = dense_model(), None, 0.05
    for step, first in enumerate(range(0, ROWS, 8)):
        new = 0.05 if step == 0 else 0.05 * 2 ** (step / 4)
        with tf.GradientTape() as tape:
            batch = slice(first, first + 8)
            loss = tf.reduce_mean((model(features[batch]) - labels[batch]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        velocities = velocities or [tf.zeros_like(g) for g in gradients]
        velocities = [
            0.9 * v * new / rate - new * g for v, g in zip(velocities, gradients, strict=True)
        ]
        for variable, velocity in zip(model.trainable_variables, velocities, strict=True):
            variable.assign_add(velocity)
        rate = new
    growing = hvd.callbacks.LearningRateScheduleCallback(
        0.05, lambda epoch: 2**epoch, staircase=False
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    assert_same(fit(optimizer, callbacks=[growing], epochs=1), model, 1e-5)


def load_model(folder: Path) -> None:
    """A model that is saved by rank 0 resumes everywhere, with its optimizer."""
    path = str(folder / "saved.keras")
    for make in (lambda: keras.optimizers.Adam(0.05), lambda: Halved(0.05)):
        expected = fit(make(), whole=True, epochs=2)
        ours = fit(hvd.DistributedOptimizer(make()), epochs=1)
        if hvd.rank() == 0:
            ours.save(path)
        hvd_tf.broadcast_object(None, 0)
        plain = keras.models.load_model(path, custom_objects={"Halved": Halved})
        assert type(plain.optimizer) is type(make())
        assert plain.optimizer.get_config() == ours.optimizer.get_config()
        resumed = hvd.load_model(path, custom_optimizers=[Halved])
        resumed.fit(*own_rows(), batch_size=4, shuffle=False, verbose=0)
        assert_same(resumed, expected)
    # Loaded by rank 0 alone; the others take all from it.
    model = hvd.load_model(path, custom_objects={"Halved": Halved}) if hvd.rank() == 0 else None
    if model is None:
        model = dense_model(3)
        model.compile(hvd.DistributedOptimizer(Halved(0.7)), "mse")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*own_rows(), batch_size=4, shuffle=False, verbose=0, callbacks=[broadcast])
    assert_same(model, expected)
    assert_equal_on_ranks([*model.weights, *model.optimizer.variables])


class Halved(keras.optimizers.RMSprop):
    """An optimizer of the user's own."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / 2)


def variables(folder: Path) -> None:
    """Keras variables as arguments of Horovod's functions."""
    rank = hvd.rank()
    ours = [keras.Variable([1.0 + rank, 2.0]), keras.Variable([rank], dtype="int64")]
    for gather in (hvd_tf.allgather, hvd.allgather):
        np.testing.assert_array_equal(gather(ours[0]), [1, 2, 2, 2])
    for reduced in (hvd_tf.allreduce(ours[0]), hvd.allreduce(ours[0]), hvd_tf.allreduce(
        ours[0], compression=hvd.Compression.fp16)):  # fmt: skip
        np.testing.assert_array_equal(reduced, [1.5, 2])
    np.testing.assert_array_equal(hvd_tf.grouped_allreduce(ours[:1], op=hvd.Sum)[0], [3, 4])
    np.testing.assert_array_equal(hvd_tf.broadcast(ours[0], 1), [2, 2])
    np.testing.assert_array_equal(hvd.broadcast(ours[0], 1), [2, 2])

    @tf.function
    def compiled() -> Any:
        return hvd_tf.allreduce(ours[0], op=hvd.Sum)

    np.testing.assert_array_equal(compiled(), [3, 4])
    assert hvd_tf.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    hvd_tf.broadcast_variables(ours, root_rank=1)
    np.testing.assert_array_equal(ours[0].numpy(), [2, 2])
    np.testing.assert_array_equal(ours[1].numpy(), [1])
    ours[0].assign([rank, rank])
    hvd_tf.broadcast_variables(ours[:1], root_rank=1, inplace=True)
    np.testing.assert_array_equal(ours[0].numpy(), [1, 1])


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def mixed_precision(folder: Path) -> None:
    """Ranks skip a step together where the gradients of one of them are not finite."""
    with policy("mixed_float16"):
        for outside in (True, False):
            optimizer = keras.optimizers.SGD(0.05)
            if outside:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
            model = dense_model()
            model.compile(hvd.DistributedOptimizer(optimizer), "mse")
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            features, labels = own_rows()
            features = features.copy()
            if hvd.rank() == 1:
                features[5] = np.inf  # in the second step
            model.fit(features, labels, batch_size=4, shuffle=False, verbose=0)
            # Where Keras chooses the first scale, that may be too large for another step or two.
            applied = int(model.optimizer.iterations)
            assert applied == 3 if outside else applied < 4
            assert np.isfinite(model.weights[0].numpy()).all()
            assert_equal_on_ranks([*model.weights, *model.optimizer.variables])


def local_layers(folder: Path) -> None:
    """Layers whose gradients stay each rank's."""
    import horovod.keras as hvd_keras

    for scaled in (True, False):
        model = dense_model()
        optimizer = hvd_keras.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=model.layers[0], scale_local_gradients=scaled
        )
        with tf.GradientTape() as tape:
            features, labels = own_rows()
            loss = tf.reduce_mean((model(features) - labels) ** 2)
        plain = tape.gradient(loss, model.trainable_variables)
        before = [variable.numpy() for variable in model.trainable_variables]
        optimizer.apply_gradients(zip(plain, model.trainable_variables, strict=True))
        means = [hvd.allreduce(gradient) for gradient in plain]
        local = [gradient / (2 if scaled else 1) for gradient in plain]
        for n, expected in enumerate([*local[:2], *means[2:]]):
            moved = before[n] - model.trainable_variables[n].numpy()
            np.testing.assert_allclose(moved, 0.1 * expected, 1e-4, 1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(features) - labels) ** 2)
    partial = hvd_tf.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    gradients = partial.gradient(loss, model.trainable_variables)
    assert_equal_on_ranks(gradients[2:])
    one, other = hvd_tf.allgather_object(gradients[0].numpy())
    assert not np.array_equal(one, other)


def process_sets(folder: Path) -> None:
    """Ranks that are no part of a process set, or alone in it, train by themselves."""
    alone = hvd.add_process_set([0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=alone)
    expected = dense_model()
    expected.compile(keras.optimizers.SGD(0.1), "mse")
    expected.fit(*own_rows(), batch_size=4, epochs=3, shuffle=False, verbose=0)
    assert_same(fit(optimizer), expected)


def batch_normalization(folder: Path) -> None:
    def normalized(layer: Any) -> keras.Model:
        model = keras.Sequential([*dense_model().layers[:1], layer, keras.layers.Dense(1)])
        keras.utils.set_random_seed(4)
        model.build((None, 4))
        return model

    expected = normalized(keras.layers.BatchNormalization())
    fit(keras.optimizers.SGD(0.1), model=expected, whole=True)
    ours = normalized(hvd_tf.SyncBatchNormalization())
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), model=ours, callbacks=[broadcast])
    assert_same(ours, expected, 1e-5)


def refusals(folder: Path) -> None:
    sgd = keras.optimizers.SGD
    with pytest.raises(ValueError, match="Average and Sum"):
        hvd.DistributedOptimizer(sgd(), op=hvd_tf.Adasum)
    with pytest.raises(ValueError, match="gradient_predivide_factor.*Average"):
        hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=3), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)
    with pytest.raises(TypeError, match=r"object.*keras\.optimizers"):
        hvd.DistributedOptimizer(object())
    with pytest.raises(ValueError, match="ModelCheckpoint"):
        hvd.callbacks.BestModelCheckpoint()
    unbuilt = keras.layers.Dense(1, name="later")
    with pytest.raises(ValueError, match="later"):
        hvd_tf.PartialDistributedGradientTape(tf.GradientTape(), local_layers=unbuilt)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)

    @tf.function(jit_compile=True)
    def compiled() -> Any:
        return hvd_tf.allreduce(tf.constant(1.0))

    with pytest.raises(ValueError, match="jit_compile=False"):
        compiled()


def adasum(folder: Path) -> None:
    """Gradients that are equal stay what they are; orthogonal ones are added up."""
    variable = keras.Variable([1.0, 1.0])
    for own, expected in (([2.0, 2.0], [2, 2]), ([1.0 - hvd.rank(), hvd.rank()], [1, 1])):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.constant(own, tf.float32) * variable)
        tape = hvd_tf.DistributedGradientTape(tape, op=hvd_tf.Adasum)
        np.testing.assert_allclose(tape.gradient(loss, [variable])[0], expected, 1e-6)


def elastic_state(folder: Path) -> None:
    """State is that of rank 0, is committed by the callback and restored."""
    model = dense_model(1 + hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1 * (1 + hvd.rank()))), "mse")
    state = hvd.elastic.KerasState(model, batch=20 + hvd.rank())
    state.sync()
    assert state.batch == 20
    assert_equal_on_ranks([*model.weights, *model.optimizer.variables])
    commit = hvd.elastic.CommitStateCallback(state)
    model.fit(*own_rows(), batch_size=4, verbose=0, callbacks=[commit])
    committed = model.get_weights()
    model.set_weights([weight + 1 for weight in committed])
    state.restore()
    for one, other in zip(model.get_weights(), committed, strict=True):
        np.testing.assert_array_equal(one, other)


def metrics_of_some_ranks(folder: Path) -> None:
    validation: dict[str, Any] = {"validation_data": rows()} if hvd.rank() == 0 else {}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit(optimizer, callbacks=[hvd.callbacks.MetricAverageCallback()], **validation)
