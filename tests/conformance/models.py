"""The model forms that cases are composed of. Each builder returns a model that is not compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import Input, Model, Sequential, layers


def compiled(model: Any, optimizer: Any = "sgd", loss: Any = "mse", **more: Any) -> Any:
    """Return ``model``, compiled."""
    model.compile(optimizer=optimizer, loss=loss, **more)
    return model


def stack(*members: Any, shape: Sequence[int | None] = (4,), out: int = 1, **head: Any) -> Any:
    """Return a Sequential of layers with a dense head."""
    return Sequential([Input(shape), *members, layers.Dense(out, **head)])


def dense(out: int = 1, activation: str | None = None) -> Any:
    """Return the network that most cases train: two dense layers on ``x``."""
    return stack(layers.Dense(8, "tanh"), out=out, activation=activation)


def lazy(out: int = 1) -> Any:
    """Return a Sequential that learns its input's shape from the first batch."""
    return Sequential([layers.Dense(8, "tanh"), layers.Dense(out)])


def functional() -> Any:
    """Return a functional model with a skip connection."""
    inputs = Input((4,))
    hidden = layers.Dense(4, "tanh")(inputs)
    return Model(inputs, layers.Dense(1)(layers.add([hidden, inputs])))


def nested() -> Any:
    """Return a functional model with a Sequential and a functional model inside."""
    inputs = Input((4,))
    inner = Sequential([Input((4,)), layers.Dense(5, "tanh")], name="inner")
    other = Input((5,))
    outer = Model(other, layers.Dense(3, "tanh")(other), name="outer")
    return Model(inputs, layers.Dense(1)(outer(inner(inputs))))


def shared() -> Any:
    """Return a model that puts one layer on two inputs."""
    first, second = Input((2,), name="first"), Input((3,), name="second")
    layer = layers.Dense(4, "tanh")
    narrow = layers.Dense(2)
    both = layers.concatenate([layer(first), layer(narrow(second))])
    return Model([first, second], layers.Dense(1)(both))


def two_inputs(names: tuple[str | None, str | None] = ("a", "b"), *, as_dict: bool = False) -> Any:
    """Return a model of two inputs, which are a list or a dictionary."""
    a, b = Input((2,), name=names[0]), Input((3,), name=names[1])
    out = layers.Dense(1)(layers.Dense(4, "tanh")(layers.concatenate([a, b])))
    return Model({"left": a, "right": b} if as_dict else [a, b], out)


def nested_inputs() -> Any:
    """Return a model whose inputs are a list within a dictionary."""
    a, b, s = Input((2,)), Input((3,)), Input((1,))
    out = layers.Dense(1)(layers.Dense(4, "tanh")(layers.concatenate([a, b, s])))
    return Model({"pair": [a, b], "single": s}, out)


def two_outputs(kind: str = "list") -> Any:
    """Return a model that gives a number, ``zeta``, and three scores, ``alpha``."""
    inputs = Input((4,))
    hidden = layers.Dense(6, "tanh")(inputs)
    # Named so that their order is not the alphabet's.
    zeta = layers.Dense(1, name="zeta")(hidden)
    alpha = layers.Dense(3, "softmax", name="alpha")(hidden)
    outputs: dict[str, Any] = {
        "list": [zeta, alpha],
        "dict": {"zeta": zeta, "alpha": alpha},
        "other names": {"value": zeta, "scores": alpha},
    }
    return Model(inputs, outputs[kind])


def tied() -> Any:
    """Return an autoencoder whose second half is the first one's kernel, turned."""

    @keras.saving.register_keras_serializable("conformance")
    class Tied(Model):
        def __init__(self, **more: Any) -> None:
            super().__init__(**more)
            self.down = layers.Dense(3, "tanh")

        def call(self, inputs: Any) -> Any:
            return keras.ops.matmul(self.down(inputs), keras.ops.transpose(self.down.kernel))

    return Tied()


def frozen() -> Any:
    """Return a model whose first layer is not trained."""
    model = stack(layers.Dense(6, "tanh"), layers.Dense(5, "tanh"))
    model.layers[0].trainable = False
    return model


def recurrent(layer: Any) -> Any:
    """Return a model of a recurrent layer on ``series``."""
    return stack(layer, shape=(5, 3))


def masked(layer: Any, out: int = 1, activation: str | None = None) -> Any:
    """Return a model of ``tokens`` whose padding is masked."""
    embedding = layers.Embedding(10, 4, mask_zero=True)
    return Sequential([Input((6,), dtype="int32"), embedding, layer, layers.Dense(out, activation)])


def attention(kind: Any = None) -> Any:
    """Return self-attention on ``series``."""
    inputs = Input((5, 3))
    if kind is None:
        seen = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    else:
        seen = kind()([inputs, inputs])
    hidden = layers.LayerNormalization()(layers.add([seen, inputs]))
    return Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))


def convolution(*members: Any) -> Any:
    """Return a small convolutional classifier of ``image``."""
    first = layers.Conv2D(4, 3, activation="relu")
    last = layers.GlobalAveragePooling2D()
    return stack(first, *members, last, shape=(8, 8, 1), out=3, activation="softmax")


@keras.saving.register_keras_serializable("conformance")
class Plain(Model):
    """A subclassed model as tutorials write it."""

    def __init__(self, units: int = 8, out: int = 1, **more: Any) -> None:
        super().__init__(**more)
        self.units, self.out = units, out
        self.hidden = layers.Dense(units, "tanh")
        self.head = layers.Dense(out)

    def call(self, inputs: Any) -> Any:
        return self.head(self.hidden(inputs))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units, "out": self.out}


class Unsaved(Model):
    """A subclassed model with an argument that Keras cannot write down."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.head = head

    def call(self, inputs: Any) -> Any:
        return self.head(self.hidden(inputs))


@keras.saving.register_keras_serializable("conformance")
class TakesPair(Model):
    """A subclassed model that takes its inputs apart."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.hidden = layers.Dense(6, "tanh")
        self.head = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        a, b = inputs
        return self.head(self.hidden(keras.ops.concatenate([a, b], axis=1)))


@keras.saving.register_keras_serializable("conformance")
class TakesDict(Model):
    """A subclassed model that takes a dictionary and gives one."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.hidden = layers.Dense(6, "tanh")
        self.zeta = layers.Dense(1)
        self.alpha = layers.Dense(3, "softmax")

    def call(self, inputs: Any) -> Any:
        hidden = self.hidden(keras.ops.concatenate([inputs["p"], inputs["q"]], axis=1))
        return {"zeta": self.zeta(hidden), "alpha": self.alpha(hidden)}
