"""Cases: every loss that Keras exports, and the ways to give it."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, losses

from .case import Case
from .models import Plain, compiled, dense, stack, two_outputs

CE = "sparse_categorical_crossentropy"
TWO = ["y", "label"]
RATIO = "the loss is one ratio over the whole batch, not a mean over its rows"
PAIRS = "the loss compares the rows of a batch with each other"


def own_loss(y_true: Any, y_pred: Any) -> Any:
    """Return a loss that is a function."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def mean_loss(y_true: Any, y_pred: Any) -> Any:
    """Return a mean over the batch."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


def sum_loss(y_true: Any, y_pred: Any) -> Any:
    """Return a sum over the batch."""
    return 0.1 * keras.ops.sum(keras.ops.abs(y_true - y_pred))


def largest_loss(y_true: Any, y_pred: Any) -> Any:
    """Return the largest error of the batch."""
    return keras.ops.max(keras.ops.abs(y_true - y_pred))


@keras.saving.register_keras_serializable("conformance")
class OwnLoss(losses.Loss):
    """A loss of a user's own."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


def ctc() -> Any:
    """Return a model that gives scores of four classes at six steps."""
    return stack(layers.Embedding(10, 4), shape=(6,), out=4)


def of_steps() -> Any:
    """Return a model that gives chances of three classes at each of five steps."""
    return stack(layers.Dense(5, "tanh"), shape=(5, 3), out=3, activation="softmax")


def trained_on(loss: Callable[[], Any], out: int, activation: str | None) -> Callable[[], Any]:
    """Return what makes a network with that loss and such a head."""
    return lambda: compiled(dense(out, activation), loss=loss())


# fmt: off
# By Keras' name: the loss, the label, and the head of the network (outputs, activation).
LOSSES: dict[str, tuple[Callable[[], Any], str, int, str | None]] = {
    "BinaryCrossentropy": (lambda: "binary_crossentropy", "binary", 1, "sigmoid"),
    "BinaryFocalCrossentropy": (lambda: losses.BinaryFocalCrossentropy(apply_class_balancing=True), "many", 3, "sigmoid"),
    "CategoricalCrossentropy": (lambda: losses.CategoricalCrossentropy(label_smoothing=0.1), "onehot", 3, "softmax"),
    "CategoricalFocalCrossentropy": (lambda: "categorical_focal_crossentropy", "onehot", 3, "softmax"),
    "CategoricalGeneralizedCrossEntropy": (lambda: losses.CategoricalGeneralizedCrossEntropy(), "label", 3, "softmax"),
    "CategoricalHinge": (lambda: "categorical_hinge", "onehot", 3, None),
    "Circle": (lambda: losses.Circle(), "label", 3, None),
    "CosineSimilarity": (lambda: "cosine_similarity", "y2", 2, None),
    "Dice": (lambda: "dice", "many", 3, "sigmoid"),
    "Hinge": (lambda: "hinge", "signs", 3, "tanh"),
    "Huber": (lambda: losses.Huber(0.5), "y", 1, None),
    "KLDivergence": (lambda: "kl_divergence", "simplex", 3, "softmax"),
    "LogCosh": (lambda: "log_cosh", "y", 1, None),
    "MeanAbsoluteError": (lambda: "mae", "y", 1, None),
    "MeanAbsolutePercentageError": (lambda: "mape", "positive", 1, "softplus"),
    "MeanSquaredError": (lambda: losses.MeanSquaredError(), "y2", 2, None),
    "MeanSquaredLogarithmicError": (lambda: "msle", "positive", 1, "softplus"),
    "Poisson": (lambda: "poisson", "positive", 1, "softplus"),
    "SparseCategoricalCrossentropy": (lambda: losses.SparseCategoricalCrossentropy(from_logits=True), "label", 3, None),
    "SquaredHinge": (lambda: "squared_hinge", "signs", 3, "tanh"),
    "Tversky": (lambda: losses.Tversky(0.3, 0.7), "many", 3, "sigmoid"),
}
APART = {"Dice": RATIO, "Tversky": RATIO, "Circle": PAIRS}
OF_LOSSES = [
    Case(
        f"loss-{name.lower()}",
        trained_on(loss, out, activation),
        y=label,
        two=None if name in APART else 1e-5,
        why=APART.get(name, ""),
        note="two ranks warn of it" if name in APART else "",
        shows=(f"losses.{name}",),
    )
    for name, (loss, label, out, activation) in LOSSES.items()
] + [
    Case("loss-ctc", lambda: compiled(ctc(), loss="ctc"), x="tokens", y="codes", shows=("losses.CTC",)),
    Case("loss-function", lambda: compiled(dense(2), loss=own_loss), y="y2", custom_objects={"own_loss": own_loss}),
    Case("loss-function-scalar", lambda: compiled(dense(2), loss=mean_loss), y="y2", custom_objects={"mean_loss": mean_loss}),
    Case("loss-function-sum", lambda: compiled(dense(2), loss=sum_loss), y="y2", custom_objects={"sum_loss": sum_loss}, refused_by_two="is a sum over the rows"),
    Case("loss-function-largest", lambda: compiled(dense(2), loss=largest_loss), y="y2", custom_objects={"largest_loss": largest_loss}, two=None, why=PAIRS, note="two ranks warn of it"),
    Case("loss-class", lambda: compiled(dense(2), loss=OwnLoss()), y="y2", shows=("losses.Loss",)),
    Case("loss-sum", lambda: compiled(dense(), loss=losses.MeanSquaredError(reduction="sum")), two=1e-4, why="sums are larger than means"),
    Case("loss-none-reduction", lambda: compiled(dense(), loss=losses.MeanSquaredError(reduction="none")), refused_by_two="has reduction='none'"),
    Case("loss-mean-with-sample-weight", lambda: compiled(dense(), loss=losses.MeanSquaredError(reduction="mean_with_sample_weight")), weight="w"),
    Case("loss-ignore-class", lambda: compiled(of_steps(), loss=losses.SparseCategoricalCrossentropy(ignore_class=2)), x="series", y="steps", note="a mean over the labels of other classes"),
    Case("loss-ignore-class-alone", lambda: compiled(of_steps(), loss=losses.SparseCategoricalCrossentropy(ignore_class=2)), x="series", y="void", rows=49, note="no label of the last batch counts"),
    Case("loss-mean-with-weights-all-zero", lambda: compiled(dense(), loss=losses.MeanSquaredError(reduction="mean_with_sample_weight")), weight="nothing"),
    Case("loss-list", lambda: compiled(two_outputs(), loss=["mae", CE]), y=TWO),
    Case("loss-one-for-two-outputs", lambda: compiled(two_outputs(), loss="mse"), y=["y", "onehot"]),
    Case("loss-dict-by-layer", lambda: compiled(two_outputs(), loss={"alpha": CE, "zeta": "mse"}), y=TWO),
    Case("loss-weights-list", lambda: compiled(two_outputs(), loss=["mse", CE], loss_weights=[0.2, 2.0]), y=TWO),
    Case("loss-weights-dict", lambda: compiled(two_outputs("dict"), loss={"zeta": "mse", "alpha": CE}, loss_weights={"zeta": 0.2, "alpha": 2.0}), y={"zeta": "y", "alpha": "label"}),
    Case("loss-for-one-of-two", lambda: compiled(two_outputs("dict"), loss={"zeta": "mse"}), y={"zeta": "y"}, note="the other output has no label"),
    Case("weights-with-two-outputs", lambda: compiled(two_outputs(), loss=["mse", CE]), y=TWO, weight="w"),
    Case("sample-weights", lambda: compiled(dense(), metrics=["mae"], weighted_metrics=["mse"]), weight="w"),
    Case("sample-weights-all-zero", lambda: compiled(dense()), weight="nothing"),
    Case("sample-weights-zero-in-places", lambda: compiled(dense(), weighted_metrics=["mae"]), weight="seldom"),
    Case("sample-weights-of-steps", lambda: compiled(of_steps(), loss=CE, weighted_metrics=["accuracy"]), x="series", y="steps", weight="each"),
    Case("sample-weights-of-steps-mean", lambda: compiled(of_steps(), loss=losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")), x="series", y="steps", weight="each"),
    Case("run-eagerly", lambda: compiled(dense(), run_eagerly=True)),
    Case("jit-compile", lambda: compiled(dense(), jit_compile=True), one=1e-5, why="XLA fuses what the plain graph does not"),
    Case("steps-per-execution", lambda: compiled(dense(), steps_per_execution=2), note="the exchange takes place at every step"),
    Case("one-row-left", lambda: compiled(dense(), metrics=["mae"]), rows=49, note="the last batch gives one rank no row"),
    Case("one-row-left-subclassed", lambda: compiled(Plain(), metrics=["mae"]), rows=49),
    Case("full-batches-only", lambda: compiled(dense(), metrics=["mae"]), rows=48),
    Case("without-validation", lambda: compiled(dense(), metrics=["mae"]), validation=False),
]
# fmt: on
