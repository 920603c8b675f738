"""The small network that the training benchmark trains, and how it is timed."""

from __future__ import annotations

from typing import Any

SIDE = 24
# Steps of each epoch that are not timed: starting to read, compiling.
SKIP = 20


def make_cnn() -> Any:
    """Return a compiled network for grey images of ``SIDE`` x ``SIDE``."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((SIDE, SIDE, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
