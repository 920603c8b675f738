"""Keras objects that functions capture: copies that are equal, or refused."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import ops

from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.serialize import Pickler, check_picklable, dumps


class Focal(keras.losses.Loss):
    """Its configuration, as most people leave it, does not hold its own arguments."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__(name="focal")
        self.gamma = gamma

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_true - y_pred) ** self.gamma, axis=-1)


class FocalTold(Focal):
    def __init__(self, gamma: float = 2.0, reduction: str = "sum", name: str = "focal") -> None:
        super().__init__(gamma)
        self.reduction = reduction

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "gamma": self.gamma}


@keras.saving.register_keras_serializable("ours")
class Scaled(keras.layers.Layer):
    def __init__(self, by: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by = by

    def call(self, inputs: Any) -> Any:
        return inputs * self.by

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "by": self.by}


class Above(keras.metrics.Metric):
    def __init__(self, limit: float = 0.5, name: str = "above", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.limit = limit
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(ops.sum(ops.cast(y_pred > self.limit, "float32")))

    def result(self) -> Any:
        return self.count


class AboveTold(Above):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "limit": self.limit}


class Slower(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / 2)


def twice(x: Any) -> Any:
    return 2 * x


def asymmetric(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.maximum(3 * (y_true - y_pred), y_pred - y_true), axis=-1)


def objects() -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    dense = keras.layers.Dense(2, activation=twice)
    model = keras.Model(inputs, Scaled(3.0)(dense(inputs)))
    model.compile(Slower(0.5), FocalTold(gamma=1.5), metrics=[AboveTold(0.25)])
    return {
        "loss": Focal(gamma=3.0),
        "wrapped": keras.losses.MeanSquaredError(),
        "metric": AboveTold(0.25),
        "mean": keras.metrics.MeanMetricWrapper(asymmetric, name="mean"),
        "optimizer": Slower(0.5),
        "model": model,
        "several": [keras.Sequential([keras.Input((3,)), Scaled(2.0)])],
    }


def collected(objects: dict[str, Any]) -> list[np.ndarray]:
    """Return what the objects compute."""
    x = np.linspace(0, 1, 12, dtype="float32").reshape(4, 3)
    y = x[:, :2] + 0.3
    values = [objects[name](y, y * 0.5) for name in ("loss", "wrapped")]
    for name in ("metric", "mean"):
        objects[name].update_state(y, y * 0.5)
        values.append(objects[name].result())
    weight = keras.Variable(np.ones(2, "float32"))
    objects["optimizer"].apply([ops.ones(2)], [weight])
    values += [weight, objects["model"](x), objects["several"][0](x)]
    objects["model"].fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return [np.array(value) for value in (*values, *objects["model"].get_weights())]


@pytest.mark.thorough
def test_they_are_the_same_where_they_come_to(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(dumps((collected, objects())))
    code = (
        "import pickle, sys; folder = sys.argv[1]; "
        "told, found = pickle.load(open(folder + '/in', 'rb')); "
        "pickle.dump(told(found), open(folder + '/out', 'wb'))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    there = pickle.loads((tmp_path / "out").read_bytes())
    for ours, theirs in zip(collected(objects()), there, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


class Shaped(keras.layers.Layer):
    """Takes what Keras restores otherwise, and what it was not given."""

    def __init__(self, units: int, input_shape: Any = None, scale: float = 1.0, **kw: Any) -> None:
        super().__init__(**kw)
        self.units, self.scale = units, scale

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


class OwnWay(keras.metrics.Metric):
    def __init__(self, limit: float) -> None:
        super().__init__(name="own_way")
        self.limit = limit

    def __reduce__(self) -> Any:
        return OwnWay, (self.limit,)


class Guarded(Focal):
    def __init__(self) -> None:
        super().__init__(3.0)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


@keras.saving.register_keras_serializable("ours")
def unrelated(x: Any) -> Any:
    return LOCK


LOCK = threading.Lock()


def test_what_can_be_sent_is_sent() -> None:
    """Also an own way to be pickled, and whatever else is registered."""
    assert pickle.loads(dumps(Shaped(3))).units == 3
    assert pickle.loads(dumps(OwnWay(0.75))).limit == 0.75
    assert pickle.loads(dumps(Guarded())).gamma == 3.0
    assert pickle.loads(dumps(Above())).limit == 0.5
    twice_and_thrice = [keras.layers.Lambda(lambda x: 2 * x), keras.layers.Lambda(lambda x: 3 * x)]
    model = keras.Sequential([keras.Input((1,)), *twice_and_thrice])
    assert float(pickle.loads(dumps(model))(np.ones((1, 1)))[0, 0]) == 6.0


def test_what_a_function_returns_is_copied_alike() -> None:
    """On a rank, the module of a class that came by value is none that could be imported."""
    there = {"__module__": "a_module_of_the_drivers"}
    for cls in (Above, AboveTold):
        stream = io.BytesIO()
        Pickler(stream).dump(type(cls.__name__, (cls,), dict(there))(0.25))
        assert pickle.loads(stream.getvalue()).limit == 0.25


def compiled(**arguments: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(**arguments)
    return model


def activation(by: float) -> Any:
    def act(x: Any) -> Any:
        return x * by

    return act


def error(by: float) -> Any:
    def err(y_true: Any, y_pred: Any) -> Any:
        return by * ops.mean(ops.abs(y_true - y_pred), axis=-1)

    return err


def gelu(x: Any) -> Any:
    return 100 * x


def activated(*functions: Any) -> Any:
    layers = [keras.layers.Activation(one) for one in functions]
    return keras.Sequential([keras.Input((3,)), *layers])


class Narrow(Above):
    def __init__(self, name: str = "narrow") -> None:
        super().__init__(name=name)


class Plain(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()


class Filled(keras.layers.Layer):
    """Makes what configuration and attributes do not tell."""

    def __init__(self, value: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table = keras.Variable(np.full(3, value, "float32"), trainable=False)
        self.inner = keras.layers.Dense(3) if value > 1 else keras.layers.ReLU()

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs) + self.table

    def get_config(self) -> dict[str, Any]:
        return dict(super().get_config())


class Gan(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def compile(self, one: Any, two: Any) -> None:
        super().compile()
        self.one, self.two = one, two


def gan() -> Any:
    model = Gan()
    model(np.ones((2, 3)))
    model.compile(keras.optimizers.SGD(), keras.optimizers.SGD())
    return model


def excluding_variable() -> Any:
    model = compiled(loss="mse")
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
    model.compile(optimizer, "mse")
    return model


def inside_another() -> Any:
    """Return a model whose optimizer was built for the variables of another one."""
    outer = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    outer.compile(trained("adam").optimizer, "mse")
    return outer


@pytest.mark.parametrize(
    ("made", "differing"),
    [
        (Plain, "Plain.*(dtype|trainable)"),
        (Narrow, "Narrow.*dtype"),
        (lambda: Filled(3.0), "Filled.*(inner|layers)"),
        (gan, "Gan"),
        (lambda: trained("adam").optimizer, r"Adam\b"),
        (excluding_variable, "optimizer._exclude_from_weight_decay"),
        (inside_another, "Sequential"),
        (lambda: nested(loss="mse"), "optimizer"),
        (lambda: changed(Scaled(2.0), local=threading.Lock()), "local|lock"),
        (lambda: changed(Scaled(2.0), extra=keras.layers.Dense(1)), "Scaled.*extra"),
        (lambda: compiled(loss="mse", metrics=[Narrow()]), "Narrow.*dtype"),
    ],
)
def test_what_cannot_be_copied_is_refused(made: Any, differing: str) -> None:
    original = made()

    def model_fn() -> Any:
        return original

    with pytest.raises(InvalidInputError, match=f"(?s)'original'.*{differing}") as refused:
        check_picklable({"model_fn": model_fn})
    assert "inside" in str(refused.value), "it says what to do"


def excluding(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    return optimizer


def nested(**arguments: Any) -> Any:
    """Return a model that holds a compiled one."""
    return keras.Sequential([keras.Input((3,)), compiled(**arguments)])


def nested_trained(**arguments: Any) -> Any:
    inner = compiled(**arguments)
    inner.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    return keras.Sequential([keras.Input((3,)), inner])


def trained(optimizer: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    return model


def subclassed() -> Any:
    model = changed(Tempered(), temp=5.0)
    model(np.ones((4, 3)))
    model.compile("adam", "mse", metrics=[Above(0.25)])
    return model


def normalized() -> Any:
    layer = keras.layers.Normalization()
    layer.adapt(np.arange(12.0).reshape(4, 3))
    return keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])


def adapted_by_rank() -> Any:
    """Return a model with LoRA: Keras stores its sum with the kernel."""
    model = compiled(loss="mse")
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(np.ones((2, 1)))
    return model


SCALE = 5.0

# Each model, and what it is compiled with, if it is not yet.
EQUAL: dict[str, Any] = {
    "one function name": lambda: activated(activation(2), activation(3)),
    "name of Keras'": lambda: activated(gelu, "gelu"),
    "lambda and global": lambda: activated(lambda x: x * SCALE),
    "Lambda": lambda: keras.Sequential(
        [keras.Input((3,)), keras.layers.Lambda(lambda x: x * SCALE)]
    ),
    "argument left out": lambda: compiled(loss="mse", metrics=[Above(0.25)]),
    "loss": lambda: compiled(loss=Focal(3.0)),
    "function": lambda: compiled(loss=asymmetric, metrics=[error(2), error(3)]),
    "lambda": lambda: compiled(loss=lambda y, p: ops.mean(SCALE * (y - p) ** 2)),
    "Huber": lambda: compiled(loss=keras.losses.Huber(delta=0.3)),
    "cosine": lambda: compiled(loss="mse", metrics=[keras.metrics.CosineSimilarity(axis=0)]),
    "cosine trained": lambda: nested_trained(
        loss="mse", metrics=[keras.metrics.CosineSimilarity(axis=0)]
    ).layers[0],
    "inner Huber": lambda: nested_trained(loss=keras.losses.Huber(delta=0.3)),
    "inner cosine": lambda: nested_trained(
        loss="mse", metrics=[keras.metrics.CosineSimilarity(axis=0)]
    ),
    "inner lambda": lambda: nested_trained(loss=lambda y, p: ops.mean(SCALE * (y - p) ** 2)),
    "inner trained": lambda: keras.Sequential([keras.Input((3,)), trained("adam")]),
    "weight decay": lambda: compiled(optimizer=excluding(keras.optimizers.AdamW(0.1)), loss="mse"),
    "schedule": lambda: compiled(
        optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)), loss="mse"
    ),
    "schedule left out": lambda: compiled(optimizer=FactoredTold(Scheduled(0.5)), loss="mse"),
    "schedule changed": lambda: compiled(
        optimizer=FactoredTold(changed(ScheduledTold(0.5), calls=3)), loss="mse"
    ),
    "optimizer left out": lambda: compiled(optimizer=Factored(factor=3.0), loss="mse"),
    "optimizer changed": lambda: compiled(optimizer=changed(Slower(0.5), mine=1), loss="mse"),
    "regularizer left out": lambda: keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_regularizer=Steep(3.0))]
    ),
    "own model": subclassed,
    "adapted": normalized,
    "LoRA": adapted_by_rank,
    "trained": lambda: trained("adam"),
}


# One for each way to hold what Keras' configuration does not.
CORE = {
    *("one function name", "Lambda", "argument left out", "loss", "function", "lambda"),
    *("optimizer left out", "own model", "adapted", "LoRA", "trained"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in CORE else pytest.mark.thorough) for name in EQUAL],
)
def test_loss_metrics_and_training_are_equal(name: str) -> None:
    """On random rows, also a step of training later: each came out as another one once."""
    model = EQUAL[name]()
    if not model.compiled:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    copy = pickle.loads(dumps(lambda: model))()
    assert copy is not model
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8, 3)).astype("float32")
    y = rng.normal(size=np.shape(model(x))).astype("float32")
    for _ in range(2):
        one, two = (each.evaluate(x, y, verbose=0, return_dict=True) for each in (model, copy))
        assert one == two
        for ours, theirs in zip(model.layers, copy.layers, strict=True):
            if getattr(ours, "compiled", False):
                assert ours.evaluate(x, y, verbose=0) == theirs.evaluate(x, y, verbose=0)
        for each in (model, copy):
            each.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for ours, theirs in zip(model.variables, copy.variables, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs), err_msg=ours.path)


def test_lookups_keep_what_they_have_learnt() -> None:
    words = np.array(["a b", "b c"])
    text = keras.layers.TextVectorization(output_sequence_length=2)
    text.adapt(words)
    lookup = keras.layers.StringLookup(output_mode="one_hot")
    lookup.adapt(["x", "y"])
    model = keras.Sequential([keras.Input((), dtype="string"), text])
    for layer, rows in ((text, words), (lookup, np.array(["y"])), (model, words)):
        copy = pickle.loads(dumps(layer))
        np.testing.assert_array_equal(np.array(copy(rows)), np.array(layer(rows)))


def test_making_copies_changes_nothing_here() -> None:
    """Names and seeds of later layers are what they would have been."""
    model = compiled(loss="mse")
    last = keras.layers.Dense(1).name
    before = random.getstate()
    dumps(model)
    assert random.getstate() == before
    assert keras.layers.Dense(1).name == f"dense_{int(last.rpartition('_')[2]) + 1}"


@pytest.mark.thorough
def test_what_keras_does_store_is_sent() -> None:
    """With arguments that configurations hold, or a loss needs none for."""
    for delta in (1.0, 0.3):
        assert pickle.loads(dumps(keras.losses.Huber(delta=delta)))._fn_kwargs == {"delta": delta}
    for name, made in {**vars(keras.losses), **vars(keras.metrics)}.items():
        if isinstance(made, type) and issubclass(made, (keras.losses.Loss, keras.metrics.Metric)):
            with contextlib.suppress(TypeError, ValueError):  # what needs arguments
                assert type(pickle.loads(dumps(made()))) is made, name
    auc = pickle.loads(dumps(keras.metrics.AUC(thresholds=[0.25, 0.5])))
    np.testing.assert_allclose(auc.thresholds[1:-1], [0.25, 0.5])
    for loss in ("huber", "cosine_similarity", keras.losses.Huber(), "mse"):
        model = trained("adam")
        model.compile("adamw", loss, metrics=["mae", "cosine_similarity", "accuracy"])
        again = pickle.loads(dumps(model))
        np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


class Counting(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1


def test_callbacks_leave_the_model_of_an_earlier_fit_behind() -> None:
    """They keep it, and it may be one of which no copy can be made."""
    base = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((3,)), base, keras.layers.Dense(1)])
    model.compile("sgd", metrics=[Narrow()], loss="mse")
    used = [Counting(), keras.callbacks.EarlyStopping("loss", restore_best_weights=True)]
    model.fit(np.ones((4, 3)), np.ones((4, 1)), epochs=2, callbacks=used, verbose=0)
    check_picklable({"model_fn": lambda: base, "callbacks": used})
    counting, stopping = pickle.loads(dumps(used))
    assert (counting.epochs, counting.model, stopping.model) == (2, None, None)
    assert stopping.best == used[1].best
    assert used[0].model is model


def test_what_would_come_out_as_two_is_refused() -> None:
    """A layer that is frozen beside its model, an encoder of two models, callbacks' own layers."""
    encoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="shared")])
    decoder = keras.Sequential([encoder, keras.layers.Dense(3)])
    layer = encoder.layers[0]
    trainer = trained("adam")
    optimizer = trainer.optimizer

    def frozen() -> Any:
        layer.trainable = False
        return encoder

    def both() -> Any:
        return encoder, decoder

    def alone() -> Any:
        return decoder, decoder.layers[0]

    def callback() -> Any:
        return layer

    def again() -> Any:
        return trainer, optimizer

    kernel = layer.kernel

    def variable() -> Any:
        return encoder, kernel

    twice = "captured twice"
    for sent in ({"a": frozen}, {"a": both}, {"a": alone, "b": callback}, {"a": variable}):
        with pytest.raises(InvalidInputError, match=twice):
            check_picklable(sent)
    with pytest.raises(InvalidInputError, match=r"captured twice|Adam\b"):
        check_picklable({"a": again})
    check_picklable({"a": alone, "b": alone})
    # Nothing of these can differ.
    relu = keras.layers.ReLU()
    models = [keras.Sequential([keras.Input((3,)), relu]) for _ in range(2)]
    check_picklable({"a": lambda: models})


def test_a_model_is_compiled_with_what_it_was() -> None:
    """Also with what a configuration does not tell: Keras' own arguments, and functions."""
    by = {"loss": keras.losses.Huber(delta=0.3), "metrics": [activation(2), activation(3)]}
    again = pickle.loads(dumps(compiled(**by)))
    assert again.loss._fn_kwargs == {"delta": 0.3}
    again = pickle.loads(dumps(compiled(loss=lambda y, p: 7 * (y - p) ** 2, metrics=["mae"])))
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")
    loss = again.evaluate(x, y, verbose=0)[0]
    np.testing.assert_allclose(loss, 7 * float(again(x)[0, 0]) ** 2, rtol=1e-5)
    again = pickle.loads(dumps(compiled(loss=Focal(3.0), loss_weights=0.5, run_eagerly=True)))
    assert (again.loss.gamma, again.run_eagerly) == (3.0, True)
    similar = pickle.loads(dumps(keras.metrics.CosineSimilarity(axis=0)))
    similar.update_state([[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [0.0, 0.0]])
    np.testing.assert_allclose(similar.result(), 0.5)
    held: list[Any] = []
    model = compiled(loss=lambda y, p: held[0].layers[0].kernel[0, 0] * (y - p))
    held.append(model)
    again = pickle.loads(dumps(model))
    assert again.loss.__closure__[0].cell_contents == [again], "a loss may hold its model"


def scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "made",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: scaled(keras.optimizers.SGD(0.1, momentum=0.5)),
        lambda: excluding(keras.optimizers.AdamW(0.1)),
        lambda: scaled(excluding(keras.optimizers.AdamW(0.1))),
        lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
        lambda: Slower(0.1, momentum=0.9),
    ],
)
def test_a_trained_model_goes_on_as_it_would(made: Any) -> None:
    x = np.linspace(0, 1, 24, dtype="float32").reshape(8, 3)
    y = x[:, :1] * 3
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = made()
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    again = pickle.loads(dumps(model))
    assert again.optimizer.name == model.optimizer.name
    for one in (model, again):
        one.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    copies = [*again.variables, *again.optimizer.variables]
    for ours, theirs in zip(variables, copies, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs), err_msg=ours.path)


def test_what_is_frozen_stays_so() -> None:
    """Layers one by one within a model that is frozen, and single variables."""
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.BatchNormalization()])
    model.trainable = False
    model.trainable = True
    inner.trainable = False
    inner.layers[1].trainable = True
    model.layers[1].gamma.trainable = False
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)
    again = pickle.loads(dumps(model))
    assert [one.shape for one in again.trainable_variables] == [(3, 3), (3,), (3,)]
    assert [one.trainable for one in again.variables] == [one.trainable for one in model.variables]
    assert len(again.optimizer.variables) == len(model.optimizer.variables)
    inner.trainable = True
    inner.layers[1].trainable = True
    assert len(pickle.loads(dumps(model)).trainable_variables) == len(model.trainable_variables)


@keras.saving.register_keras_serializable("ours")
class Adapted(keras.layers.Layer):
    """Has more than its configuration and weights."""

    def __init__(self, by: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by = by
        self.mean: Any = None
        self.known: dict[str, list[int]] = {}

    def adapt(self, x: np.ndarray) -> None:
        self.mean = x.mean(axis=0)
        self.known["rows"] = [len(x)]
        self.std = ops.std(x)

    def call(self, inputs: Any) -> Any:
        return (inputs - self.mean) * self.by if self.mean is not None else inputs


def test_what_was_set_on_a_layer_goes_along() -> None:
    x = np.linspace(0, 1, 12, dtype="float32").reshape(4, 3)
    adapted = Adapted()
    adapted.adapt(x)
    model = keras.Sequential([keras.Input((3,)), adapted])
    adapted.by = 3.0
    model.note = {"of": ("mine", 1)}
    again = pickle.loads(dumps(model))
    np.testing.assert_array_equal(again(x), (x - x.mean(axis=0)) * 3)
    layer = again.layers[0]
    assert layer.known == {"rows": [4]}
    assert float(layer.std) == pytest.approx(float(x.std()))
    assert layer.get_config()["name"] == adapted.name
    alone = Adapted(2.0)
    alone.by = 4.0
    assert pickle.loads(dumps(alone)).by == 4.0
    replaced = changed(Adapted(), call=lambda x: x * SCALE)
    np.testing.assert_array_equal(pickle.loads(dumps(replaced))(x), x * SCALE)
    above = AboveTold(0.25)
    above.limit = 0.75
    assert pickle.loads(dumps(above)).limit == 0.75


class Steep(keras.regularizers.Regularizer):
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return self.by * ops.sum(ops.abs(x))

    def get_config(self) -> dict[str, Any]:
        return {"by": 1.0}


def test_how_variables_are_trained_goes_along() -> None:
    """As it was when they were made; a regularizer that a layer is given later counts for none."""
    dense = keras.layers.Dense(2, kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((3,)), dense, keras.layers.Dense(1)])
    model.layers[1].kernel_regularizer = keras.regularizers.L2(0.5)
    dense.kernel.regularizer = keras.regularizers.L1(0.25)
    again = pickle.loads(dumps(model))
    assert [float(sum(one.losses)) for one in (again, model)] == pytest.approx(
        [0.25 * float(ops.sum(ops.abs(dense.kernel)))] * 2
    )
    dense = pickle.loads(dumps(keras.layers.Dense(2, kernel_regularizer=Steep(3.0))))
    assert dense.kernel_regularizer.by == 3.0


def test_new_layers_get_names_as_beside_the_original() -> None:
    inputs = keras.Input((3,))
    base = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(2, name="dense_1")(inputs)))
    base.layers[-1].name = "dense"
    sent = dumps(base)
    keras.utils.clear_session(free_memory=False)
    there = pickle.loads(sent)
    head = keras.layers.Dense(1)
    assert head.name == "dense_2"
    keras.Model(there.inputs, head(there.outputs[0]))


class Scheduled(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate
        self.calls = 0

    def __call__(self, step: Any) -> Any:
        return self.rate

    def get_config(self) -> dict[str, Any]:
        return {}


class ScheduledTold(Scheduled):
    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}


class Factored(keras.optimizers.SGD):
    def __init__(self, learning_rate: Any = 0.1, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self.factor = factor


class FactoredTold(Factored):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


def changed(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def test_steps_that_an_optimizer_has_counted_go_along() -> None:
    for optimizer in (keras.optimizers.Adam(), scaled(keras.optimizers.Adam())):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        inner.iterations.assign(100)
        again = pickle.loads(dumps(compiled(optimizer=optimizer, loss="mse"))).optimizer
        assert int(getattr(again, "inner_optimizer", again).iterations) == 100


@keras.saving.register_keras_serializable("ours")
class Tempered(keras.Model):
    """A model of one's own, with a layer of one's own that has a ``build``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.second = Built(), Built()
        self.head = keras.layers.Dense(1)
        self.temp = 1.0

    def call(self, x: Any) -> Any:
        return self.head(self.second(self.first(x))) / self.temp


@keras.saving.register_keras_serializable("ours")
class Built(keras.layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = ([1, 2], {"k": [3]}, Pair(1, [2]))

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x: Any) -> Any:
        return x * self.scale


class Pair(NamedTuple):
    one: int
    other: list[int]


def test_what_was_set_on_a_model_of_ones_own_goes_along() -> None:
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model = Tempered()
    model(x)
    model.temp = 5.0
    model.compile("adam", "mse")
    for fitted in (False, True):
        if fitted:
            model.fit(x, y, verbose=0)
        again = pickle.loads(dumps(model))
        assert again.temp == 5.0
        np.testing.assert_array_equal(np.array(again(x)), np.array(model(x)))
        assert again.first.blocks[2] == Pair(1, [2])
    dumped = dumps([keras.Sequential([keras.Input((3,)), Built(), Built()]), Built()])
    assert [len(one.weights) for one in pickle.loads(dumped)] == [2, 0]


class Helper:
    def __init__(self, layer: Any = None) -> None:
        self.layer = layer


def test_what_is_no_plain_value_goes_along_where_it_can() -> None:
    layer = changed(Adapted(), rx=re.compile("a"), folder=Path("x"), vocab=["a"], mine=twice)
    layer.helper = Helper()
    again = pickle.loads(dumps(layer))
    assert (again.rx, again.folder, again.vocab) == (re.compile("a"), Path("x"), ["a"])
    assert (again.mine(2), again.helper.layer) == (4, None)
    layer.helper = Helper(keras.layers.Dense(1))
    with pytest.raises(InvalidInputError, match="helper"):
        dumps(layer)


@keras.saving.register_keras_serializable("ours")
class WithLoss(keras.layers.Layer):
    def __init__(self, fn: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fn = keras.losses.get(fn)

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(self.fn(x, x + 1)))
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "fn": keras.losses.serialize(self.fn)}


class OwnInitializer(keras.initializers.RandomNormal):
    pass


class Around(keras.regularizers.Regularizer):
    def __init__(self, inner: Any) -> None:
        self.inner = keras.regularizers.get(inner)

    def __call__(self, x: Any) -> Any:
        return self.inner(x)

    def get_config(self) -> dict[str, Any]:
        return {"inner": keras.regularizers.serialize(self.inner)}


class SteepTold(Steep):
    def get_config(self) -> dict[str, Any]:
        return {"by": self.by}


def test_what_is_held_by_what_keras_makes_is_found() -> None:
    """A function that is a loss and an argument, seeds that are drawn, one object in another."""
    model = keras.Sequential([keras.Input((2,)), WithLoss(asymmetric)])
    model.compile("sgd", asymmetric)
    assert pickle.loads(dumps(model)).layers[0].fn.__name__ == "asymmetric"
    arguments = {
        "kernel_initializer": OwnInitializer(),
        "kernel_regularizer": Around(SteepTold(0.3)),
    }
    before = random.getstate()
    dense = keras.layers.Dense(2, **arguments)
    random.setstate(before)
    again = pickle.loads(dumps(dense))
    assert again.kernel_regularizer.inner.by == 0.3
    optimizer = FactoredTold(ScheduledTold(0.5))
    assert pickle.loads(dumps(optimizer))._learning_rate.rate == 0.5


def test_values_that_keras_does_not_store_go_along() -> None:
    """Of LoRA, which would never learn again, and of random layers."""
    x = np.linspace(0, 1, 24, dtype="float32").reshape(8, 3)
    dense = keras.layers.Dense(4)
    model = keras.Sequential([keras.Input((3,)), dense, keras.layers.Dropout(0.5, seed=3)])
    dense.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(x, x[:, :1], batch_size=4, verbose=0, shuffle=False)
    again = pickle.loads(dumps(model))
    for one in (model, again):
        one.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, shuffle=False)
    for ours, theirs in zip(model.variables, again.variables, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs), err_msg=ours.path)
    assert float(ops.max(ops.abs(again.layers[0].lora_kernel_b))) > 0
