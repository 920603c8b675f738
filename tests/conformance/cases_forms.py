"""Cases: the forms a model can have."""

# ruff: noqa: E501
from __future__ import annotations

import keras
import numpy as np
from keras import Input, Model, Sequential, layers, optimizers

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
    frozen,
    functional,
    lazy,
    masked,
    nested,
    nested_inputs,
    recurrent,
    shared,
    stack,
    tied,
    two_inputs,
    two_outputs,
)

CE = "sparse_categorical_crossentropy"
PAIR = ["a", "b"]
TWO = ["y", "label"]
NORM = "batch normalisation: each rank's moments are those of its own rows"
DROP = "random layers draw other numbers on every rank"
SLICES = "Keras squares the gradients of a token that is several times in a batch one by one; here they are added up first, as for a dense gradient"

# fmt: off
FORMS = [
    Case("sequential", lambda: compiled(dense())),
    Case("sequential-without-input", lambda: compiled(lazy())),
    Case("functional", lambda: compiled(functional())),
    Case("nested", lambda: compiled(nested())),
    Case("sequential-in-sequential", lambda: compiled(stack(dense(5), layers.Dense(4, "tanh")))),
    Case("lazy-in-functional", lambda: compiled(stack(lazy(5)))),
    Case("shared-layer", lambda: compiled(shared()), x=PAIR),
    Case("tied-weights", lambda: compiled(tied()), y="x"),
    Case("frozen-layer", lambda: compiled(frozen())),
    Case("regularized", lambda: compiled(stack(layers.Dense(6, kernel_regularizer="l2", activity_regularizer="l1")))),
    Case("constrained", lambda: compiled(stack(layers.Dense(6, kernel_constraint="max_norm")))),
    Case("subclassed", lambda: compiled(Plain())),
    Case("subclassed-not-writable", lambda: compiled(Unsaved(layers.Dense(1))), lost="weights only", note="Keras cannot write it; `from_run` says so"),
    Case("subclassed-takes-pair", lambda: compiled(TakesPair()), x=PAIR),
    Case("subclassed-takes-dict", lambda: compiled(TakesDict(), loss={"zeta": "mse", "alpha": CE}), x={"q": "b", "p": "a"}, y={"zeta": "y", "alpha": "label"}),
    Case("subclass-in-sequential", lambda: compiled(stack(Plain(out=3)))),
    Case("inputs-list", lambda: compiled(two_inputs()), x=PAIR),
    Case("inputs-unnamed", lambda: compiled(two_inputs((None, None))), x=PAIR),
    Case("inputs-by-name", lambda: compiled(two_inputs(("zz", "aa"))), x={"aa": "b", "zz": "a"}),
    Case("inputs-dict", lambda: compiled(two_inputs(as_dict=True)), x={"right": "b", "left": "a"}),
    Case("inputs-nested", lambda: compiled(nested_inputs()), x={"pair_0": "a", "pair_1": "b", "single": "s"}, fit_x=lambda a: {"pair": (a["a"], a["b"]), "single": a["s"]}),
    Case("columns-joined", lambda: compiled(dense()), x=[["a", "s", "z"]], fit_x=lambda a: np.concatenate([a["a"], a["s"][:, None], a["z"][:, None]], 1)),
    Case("input-of-one-number", lambda: compiled(stack(layers.Dense(4, "tanh"), shape=(1,))), x="s"),
    Case("outputs-list", lambda: compiled(two_outputs(), loss=["mse", CE]), y=TWO),
    Case("outputs-dict", lambda: compiled(two_outputs("dict"), loss={"zeta": "mse", "alpha": CE}), y={"alpha": "label", "zeta": "y"}),
    Case("outputs-dict-other-names", lambda: compiled(two_outputs("other names"), loss={"value": "mse", "scores": CE}), y={"scores": "label", "value": "y"}),
    Case("autoencoder", lambda: compiled(dense(4)), y="x"),
    Case("one-label-for-two-outputs", lambda: compiled(two_outputs(), loss=["mse", CE]), y=["label", "label"]),
    Case("two-columns-for-one-output", lambda: compiled(dense(2)), y=[["y", "z"]], fit_y=lambda a: np.stack([a["y"], a["z"]], 1)),
    Case("simple-rnn", lambda: compiled(recurrent(layers.SimpleRNN(4))), x="series"),
    Case("lstm", lambda: compiled(recurrent(layers.LSTM(4))), x="series"),
    Case("gru-bidirectional", lambda: compiled(recurrent(layers.Bidirectional(layers.GRU(3)))), x="series"),
    Case("rnn-of-cells", lambda: compiled(recurrent(layers.RNN([layers.GRUCell(3), layers.LSTMCell(3)]))), x="series"),
    Case("rnn-stateful", lambda: compiled(recurrent(layers.LSTM(4, stateful=True))), x="series", refused="stateful"),
    Case("time-distributed", lambda: compiled(Sequential([Input((5, 3)), layers.TimeDistributed(layers.Dense(3, "softmax"))]), loss=CE), x="series", y="steps"),
    Case("conv-lstm", lambda: compiled(stack(layers.ConvLSTM1D(2, 3), layers.Flatten(), shape=(3, 8, 8))), x="clip"),
    Case("embedding", lambda: compiled(stack(layers.Embedding(10, 4), layers.Flatten(), shape=(6,))), x="tokens"),
    Case("embedding-adam", lambda: compiled(stack(layers.Embedding(10, 4), layers.Flatten(), shape=(6,)), optimizers.Adam(0.05)), x="tokens", one=0.15, why=SLICES),
    Case("embedding-masked-lstm", lambda: compiled(masked(layers.LSTM(4))), x="tokens"),
    Case("masked-sequence-loss", lambda: compiled(masked(layers.LSTM(4, return_sequences=True), 10, "softmax"), loss=CE), x="tokens", y="tokens"),
    Case("attention", lambda: compiled(attention()), x="series"),
    Case("additive-attention", lambda: compiled(attention(layers.AdditiveAttention)), x="series"),
    Case("convolution", lambda: compiled(convolution(), loss=CE), x="image", y="label"),
    Case("separable-convolution", lambda: compiled(convolution(layers.SeparableConv2D(3, 3), layers.MaxPooling2D()), loss=CE), x="image", y="label"),
    Case("convolution-1d", lambda: compiled(stack(layers.Conv1D(4, 3), layers.Flatten(), shape=(5, 3))), x="series"),
    Case("conv-transpose", lambda: compiled(Sequential([Input((8, 8, 1)), layers.Conv2D(2, 3, 2, "same"), layers.Conv2DTranspose(1, 3, 2, "same")])), x="image", y="image"),
    Case("batch-normalisation", lambda: compiled(stack(layers.Dense(6), layers.BatchNormalization())), two=None, why=NORM),
    Case("batch-normalisation-lazy", lambda: compiled(Sequential([layers.Dense(6), layers.BatchNormalization(), layers.Dense(1)])), two=None, why=NORM),
    Case("batch-normalisation-frozen", lambda: compiled(stack(layers.Dense(6), layers.BatchNormalization(trainable=False)))),
    Case("layer-normalisation", lambda: compiled(stack(layers.Dense(4), layers.LayerNormalization()))),
    Case("group-normalisation", lambda: compiled(convolution(layers.GroupNormalization(2)), loss=CE), x="image", y="label"),
    Case("unit-and-spectral-normalisation", lambda: compiled(stack(layers.UnitNormalization(), layers.SpectralNormalization(layers.Dense(3)))), two=1e-4, why="the power iteration is run by every rank"),
    Case("dropout", lambda: compiled(stack(layers.Dropout(0.3))), two=None, why=DROP),
    Case("gaussian-noise", lambda: compiled(stack(layers.GaussianNoise(0.3, seed=3))), two=None, why=DROP),
    Case("recurrent-dropout", lambda: compiled(recurrent(layers.GRU(4, dropout=0.2, recurrent_dropout=0.2))), x="series", two=None, why=DROP),
    Case("lambda-layer", lambda: compiled(stack(layers.Lambda(lambda v: v * 2.0))), lost="ambda", note="`from_run` runs no code out of an archive"),
    Case("ops-in-functional", lambda: compiled(_with_ops())),
    Case("mobilenet", lambda: compiled(_mobilenet(), loss=CE), x="photo", y="label", epochs=1, one=1e-4, two=None, why=NORM),
    Case("dtype-policy-of-a-layer", lambda: compiled(stack(layers.Dense(6, dtype="float64")))),
]
# fmt: on


def _with_ops() -> Model:
    inputs = Input((4,))
    hidden = keras.ops.tanh(inputs @ keras.ops.ones((4, 3)))
    return Model(inputs, layers.Dense(1)(hidden))


def _mobilenet() -> Model:
    return keras.applications.MobileNet(
        (32, 32, 3), alpha=0.25, weights=None, classes=3, dropout=0.0
    )
