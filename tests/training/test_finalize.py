"""What layers derive from their weights follows when these are set."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horovod_spark_runner.engines.keras.model import finalize_layers

VALUES = np.linspace(100.0, 900.0, 40, dtype=np.float32).reshape(20, 2)


def normalising(adapted: bool) -> Any:
    layer = keras.layers.Normalization()
    if adapted:
        layer.adapt(VALUES)
    inner = keras.Sequential([keras.Input((2,)), layer])
    return keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1)])


def test_set_weights_reaches_normalization() -> None:
    trained, fresh = normalising(True), normalising(False)
    fresh.set_weights(trained.get_weights())
    expected = trained.predict(VALUES, verbose=0)
    assert np.abs(fresh(VALUES).numpy() - expected).max() > 10
    finalize_layers(fresh)
    np.testing.assert_allclose(fresh.predict(VALUES, verbose=0), expected, rtol=1e-6)


def test_layers_whose_state_is_no_weight_keep_it(tmp_path: Any) -> None:
    layer = keras.layers.Discretization(num_bins=4)
    layer.adapt(VALUES)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    finalize_layers(loaded)
    np.testing.assert_array_equal(loaded.predict(VALUES), model.predict(VALUES))
