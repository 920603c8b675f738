"""The trainings that most tests make: of a small network, on the digits, by two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_spark_runner import run_training


def digits_model(width: int = 16, rate: float = 0.01) -> Any:
    """Return a network with statistics and dropout, whose result depends on ranks."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def train(
    frame: Any, run_dir: Path | str, *, model_fn: Any = digits_model, **arguments: Any
) -> Any:
    """Call `run_training`, with these defaults for what a test does not say."""
    given: dict[str, Any] = {
        "feature_cols": ["image"],
        "label_cols": ["digit"],
        "num_workers": 2,
        "batch_size": 32,
        "epochs": 2,
        "run_dir": run_dir,
        "stream_logs": False,
        **arguments,
    }
    return run_training(frame, model_fn, **given)
