"""Cases: preprocessing layers within a model, and data of other kinds."""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any

from keras import Input, Model, Sequential, layers, ops

from .case import Case
from .data import WORDS, make_columns
from .models import compiled, dense, stack

CE = "sparse_categorical_crossentropy"
DRAWN = "random layers draw other numbers on every rank"


def adapted() -> Any:
    """Return a network behind a normalization that has seen data."""
    layer = layers.Normalization()
    layer.adapt(make_columns(59, 59)["x"])
    return stack(layer, layers.Dense(6, "tanh"))


def whole(*members: Any, shape: tuple[int, ...] = (), dtype: str = "int32") -> Any:
    """Return a network on whole numbers or text."""
    return Sequential([Input(shape, dtype=dtype), *members, layers.Dense(3, "softmax")])


def crossed() -> Any:
    """Return a network on the crossing of two columns."""
    code, label = Input((1,), dtype="int32"), Input((1,), dtype="int32")
    both = layers.HashedCrossing(8, output_mode="one_hot")((code, label))
    return Model([code, label], layers.Dense(1)(both))


def text_vectors() -> Any:
    """Return a network on vectorized text."""
    layer = layers.TextVectorization(vocabulary=list(WORDS), output_mode="multi_hot")
    return whole(layer, dtype="string")


def text_transformer() -> Any:
    """Return a network of embeddings, attention over words that are there, and normalization."""
    text = Input((), dtype="string")
    vectorize = layers.TextVectorization(vocabulary=list(WORDS), output_sequence_length=6)
    tokens = vectorize(text)
    present = ops.not_equal(tokens, 0)
    embedded = layers.Embedding(len(WORDS) + 2, 8)(tokens)
    embedded += layers.Embedding(6, 8)(ops.cumsum(ops.ones_like(tokens), axis=1) - 1)
    attended = layers.MultiHeadAttention(2, 4)(embedded, embedded, value_mask=present)
    hidden = layers.LayerNormalization()(embedded + attended)
    hidden = layers.LayerNormalization()(hidden + layers.Dense(8, activation="gelu")(hidden))
    pooled = layers.GlobalAveragePooling1D()(hidden, mask=present)
    return Model(text, layers.Dense(3, activation="softmax")(pooled))


# fmt: off
OF_INPUTS = [
    Case("normalization-adapted", lambda: compiled(adapted())),
    Case("normalization-given", lambda: compiled(stack(layers.Normalization(mean=0.5, variance=2.0)))),
    Case("normalization-inverted", lambda: compiled(stack(layers.Normalization(mean=0.5, variance=2.0, invert=True)))),
    Case("rescaling", lambda: compiled(stack(layers.Rescaling(0.5, 1.0)))),
    Case("discretization", lambda: compiled(stack(layers.Discretization([-1.0, 0.0, 1.0], output_mode="multi_hot")))),
    Case("discretization-embedded", lambda: compiled(stack(layers.Discretization([-1.0, 0.0, 1.0]), layers.Embedding(4, 2), layers.Flatten()))),
    Case("integer-lookup", lambda: compiled(whole(layers.IntegerLookup(vocabulary=[10, 11, 12], output_mode="one_hot"), shape=(1,)), loss=CE), x="code", y="label"),
    Case("integer-lookup-embedded", lambda: compiled(whole(layers.IntegerLookup(vocabulary=[10, 11, 12]), layers.Embedding(4, 3), layers.Flatten(), shape=(1,)), loss=CE), x="code", y="label"),
    Case("string-lookup", lambda: compiled(whole(layers.StringLookup(vocabulary=list(WORDS), output_mode="one_hot"), shape=(1,), dtype="string"), loss=CE), x="word", y="label"),
    Case("text-vectorization", lambda: compiled(text_vectors(), loss=CE), x="word", y="label"),
    Case("text-transformer", lambda: compiled(text_transformer(), loss=CE), x="sentence", y="label"),
    Case("hashing", lambda: compiled(whole(layers.Hashing(6, output_mode="one_hot"), shape=(1,)), loss=CE), x="code", y="label"),
    Case("hashing-of-text", lambda: compiled(whole(layers.Hashing(6, output_mode="one_hot"), shape=(1,), dtype="string"), loss=CE), x="word", y="label"),
    Case("hashed-crossing", lambda: compiled(crossed()), x=["code", "label"]),
    Case("category-encoding", lambda: compiled(whole(layers.CategoryEncoding(5, "multi_hot"), shape=(2,)), loss=CE), x="codes", y="label"),
    Case("resizing-and-crop", lambda: compiled(stack(layers.Resizing(6, 6), layers.CenterCrop(4, 4), layers.Flatten(), shape=(8, 8, 1))), x="image"),
    Case("random-flip-and-rotation", lambda: compiled(stack(layers.RandomFlip(), layers.RandomRotation(0.1), layers.Flatten(), shape=(8, 8, 1))), x="image", one=1e-5, two=None, why=DRAWN),
    Case("int-columns-as-numbers", lambda: compiled(stack(layers.Dense(4, "tanh"), shape=(2,))), x="codes"),
    Case("labels-without-features", lambda: compiled(dense(3, "softmax"), loss=CE), y="label"),
    Case("sequence-of-unknown-length", lambda: compiled(stack(layers.GRU(3), shape=(None, 3))), x="series"),
    Case("image-without-channel", lambda: compiled(stack(layers.Flatten(), layers.Dense(5, "tanh"), shape=(8, 8, 1))), x="image"),
    Case("class-weight", lambda: compiled(dense(3, "softmax"), loss=CE, metrics=["accuracy"]), y="label", options={"class_weight": {0: 0.5, 1: 1.0, 2: 2.0}}),
    Case("steps-per-epoch", lambda: compiled(dense()), options={"steps_per_epoch": 2}),
    Case("validation-freq", lambda: compiled(dense()), epochs=4, options={"validation_freq": 2}),
    Case("validation-freq-list", lambda: compiled(dense()), epochs=4, options={"validation_freq": [1, 4]}),
]
# fmt: on
