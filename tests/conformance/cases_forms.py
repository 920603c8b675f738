"""Cases: the forms a model can have."""

from __future__ import annotations

from keras import layers

from .case import Case
from .models import (
    Plain,
    TakesDict,
    TakesPair,
    Unsaved,
    attention,
    compiled,
    convolution,
    dense,
    functional,
    lazy,
    masked,
    nested,
    nested_inputs,
    recurrent,
    shared,
    stack,
    two_inputs,
    two_outputs,
)

CE = "sparse_categorical_crossentropy"
PAIR = ["a", "b"]
TWO = ["y", "label"]
NORM = "batch normalisation: each rank's moments are those of its own rows"
DROP = "random layers draw other numbers on every rank"
MASK = "a mask makes the loss a mean over steps, which ranks have unequally many of"

FORMS = [
    Case("sequential", lambda: compiled(dense())),
    Case("sequential-without-input", lambda: compiled(lazy())),
    Case("functional", lambda: compiled(functional())),
    Case("nested", lambda: compiled(nested())),
    Case("shared-layer", lambda: compiled(shared()), x=PAIR),
    Case("subclassed", lambda: compiled(Plain())),
    Case(
        "subclassed-not-writable",
        lambda: compiled(Unsaved(layers.Dense(1))),
        lost="weights only",
        note="Keras cannot write it, so that `from_run` has nothing to build it from",
    ),
    Case("subclassed-takes-pair", lambda: compiled(TakesPair()), x=PAIR),
    Case(
        "subclassed-takes-dict",
        lambda: compiled(TakesDict(), loss={"zeta": "mse", "alpha": CE}),
        x={"q": "b", "p": "a"},
        y={"zeta": "y", "alpha": "label"},
    ),
    Case("inputs-list", lambda: compiled(two_inputs()), x=PAIR),
    Case("inputs-unnamed", lambda: compiled(two_inputs((None, None))), x=PAIR),
    Case(
        "inputs-in-other-order",
        lambda: compiled(two_inputs(("b2", "a2"))),
        x={"a2": "b", "b2": "a"},
    ),
    Case(
        "inputs-dict",
        lambda: compiled(two_inputs(as_dict=True)),
        x={"right": "b", "left": "a"},
    ),
    Case("outputs-list", lambda: compiled(two_outputs(), loss=["mse", CE]), y=TWO),
    Case(
        "outputs-dict",
        lambda: compiled(two_outputs("dict"), loss={"zeta": "mse", "alpha": CE}),
        y={"alpha": "label", "zeta": "y"},
    ),
    Case(
        "outputs-dict-other-names",
        lambda: compiled(two_outputs("other names"), loss={"value": "mse", "scores": CE}),
        y={"scores": "label", "value": "y"},
    ),
    Case("rnn", lambda: compiled(recurrent(layers.SimpleRNN(4))), x="series"),
    Case("lstm", lambda: compiled(recurrent(layers.LSTM(4))), x="series"),
    Case(
        "gru-bidirectional",
        lambda: compiled(recurrent(layers.Bidirectional(layers.GRU(3)))),
        x="series",
    ),
    Case(
        "embedding",
        lambda: compiled(stack(layers.Embedding(10, 4), layers.Flatten(), shape=(6,))),
        x="tokens",
    ),
    Case("embedding-masked-lstm", lambda: compiled(masked(layers.LSTM(4))), x="tokens"),
    Case("attention", lambda: compiled(attention()), x="series"),
    Case("convolution", lambda: compiled(convolution(), loss=CE), x="image", y="label"),
    Case(
        "batch-normalisation",
        lambda: compiled(stack(layers.Dense(6), layers.BatchNormalization())),
        two=None,
        why=NORM,
    ),
    Case("dropout", lambda: compiled(stack(layers.Dropout(0.3))), two=None, why=DROP),
    Case("layer-normalisation", lambda: compiled(stack(layers.LayerNormalization()))),
]
