"""Cases: what ``compile`` takes."""

from __future__ import annotations

from keras import losses, metrics, optimizers

from .case import Case
from .models import compiled, dense, two_outputs

CE = "sparse_categorical_crossentropy"

COMPILE = [
    Case(
        "metrics-of-two-outputs",
        lambda: compiled(
            two_outputs(),
            loss=["mse", CE],
            loss_weights=[1.0, 0.5],
            metrics=[["mae"], ["accuracy"]],
        ),
        y=["y", "label"],
    ),
    Case("adam", lambda: compiled(dense(), optimizers.Adam(0.01)), two=1e-4),
    Case("sgd-clipnorm", lambda: compiled(dense(), optimizers.SGD(0.1, 0.9, clipnorm=0.1))),
    Case("sgd-ema", lambda: compiled(dense(), optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))),
    Case(
        "sgd-accumulates",
        lambda: compiled(dense(), optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    ),
    Case(
        "f1-score",
        lambda: compiled(
            dense(3, "softmax"), loss="categorical_crossentropy", metrics=[metrics.F1Score()]
        ),
        y="onehot",
    ),
    Case("mae", lambda: compiled(dense(), metrics=["mae"])),
    Case(
        "sample-weights",
        lambda: compiled(dense(), metrics=["mae"], weighted_metrics=["mae"]),
        weight="w",
    ),
    Case("one-row-left", lambda: compiled(dense(), metrics=["mae"]), rows=49),
    Case(
        "loss-sum",
        lambda: compiled(dense(), loss=losses.MeanSquaredError(reduction="sum")),
        refused="reduction=['sum']",
    ),
]
