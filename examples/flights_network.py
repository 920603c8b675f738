"""The network of ``flights_pipeline.py``: in a module of its own, so that it can be saved."""

from __future__ import annotations

from typing import Any


def make_network(units: int = 64, rate: float = 4e-3) -> Any:
    """Return the compiled network; called on every worker.

    Args:
        units: width of its first hidden layer.
        rate: learning rate.
    """
    import keras

    # Without an Input: how wide the rows are is seen when they come.
    layers = [keras.layers.Dense(width, activation="relu") for width in (units, 32)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mae")
    return model
