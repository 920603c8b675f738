"""Cases: the callbacks that Keras ships, and those that users write."""

from __future__ import annotations

from keras import callbacks

from .case import Case
from .models import compiled, dense

CALLBACKS = [
    Case(
        "csv-logger",
        lambda: compiled(dense(), metrics=["mae"]),
        callbacks=lambda folder: [callbacks.CSVLogger(folder / "log.csv")],
    ),
    Case(
        "early-stopping",
        lambda: compiled(dense()),
        callbacks=lambda folder: [
            callbacks.EarlyStopping("val_loss", patience=0, mode="max", restore_best_weights=True)
        ],
        epochs=4,
    ),
    Case(
        "model-checkpoint",
        lambda: compiled(dense()),
        callbacks=lambda folder: [callbacks.ModelCheckpoint(folder / "{epoch}.keras")],
    ),
    Case(
        "learning-rate-scheduler",
        lambda: compiled(dense()),
        callbacks=lambda folder: [callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
    ),
]
