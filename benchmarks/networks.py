"""The networks whose predictions are measured, a small MLP and a CNN, in both frameworks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MLP, CNN = "mlp", "cnn"
WIDTHS = {MLP: 64, CNN: 784}

Predict = Callable[[np.ndarray], np.ndarray]


class Networks(Protocol):
    """The networks of a framework.

    Attributes:
        transformer: the class of the package that predicts.
        ways: how people predict by hand, the fastest first; names for tables.
    """

    transformer: str
    ways: tuple[str, ...]

    def model_fn(self, name: str) -> Callable[[], Any]:
        """Return what `run_training` is given."""
        ...

    def keep(self, transformer: Any, run: Path) -> None:
        """Leave in a run directory what `predictor` needs besides the run itself."""
        ...

    def predictor(self, run: str, name: str, way: str) -> Predict:
        """Return a function that predicts in one of the `ways`."""
        ...


class KerasNetworks:
    """See `Networks`."""

    transformer = "TFTransformer"
    ways = ("compiled", "`model.predict`")

    def model_fn(self, name: str) -> Callable[[], Any]:
        def make() -> Any:
            import keras

            layers = keras.layers
            if name == MLP:
                inner = [layers.Dense(64, activation="relu"), layers.Dense(1)]
            else:
                inner = [
                    layers.Reshape((28, 28, 1)),
                    layers.Conv2D(8, 3, activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Conv2D(16, 3, activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Flatten(),
                    layers.Dense(10, activation="softmax"),
                ]
            model = keras.Sequential([keras.Input((WIDTHS[name],)), *inner])
            model.compile("sgd", "mse")
            return model

        return make

    def keep(self, transformer: Any, run: Path) -> None:
        """The run has the archive that Keras loads."""

    def predictor(self, run: str, name: str, way: str) -> Predict:
        import keras
        import tensorflow as tf

        model = keras.saving.load_model(f"{run}/model/model.keras", compile=False)
        if way != "compiled":
            return lambda values: model.predict(values, verbose=0)  # type: ignore[no-any-return]
        forward = tf.function(lambda x: model(x, training=False), reduce_retracing=True)
        return lambda values: forward(tf.constant(values)).numpy()  # type: ignore[no-any-return]


class TorchNetworks:
    """See `Networks`."""

    transformer = "TorchTransformer"
    ways = ("`eval()`, inference mode", "`torch.compile`")

    def module(self, name: str) -> Any:
        """Return a network with random weights."""
        from torch import nn

        if name == MLP:
            return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 10),
            nn.Softmax(1),
        )

    def model_fn(self, name: str) -> Callable[[], Any]:
        from horovod_spark_runner import TorchModel

        def make() -> TorchModel:
            import torch

            return TorchModel(self.module(name), "MSELoss", torch.optim.SGD)

        return make

    def keep(self, transformer: Any, run: Path) -> None:
        import torch

        torch.save(transformer.getModel().state_dict(), run / "weights.pt")

    def predictor(self, run: str, name: str, way: str) -> Predict:
        import torch

        module = self.module(name)
        module.load_state_dict(torch.load(f"{run}/weights.pt"))
        module.eval()
        if way == self.ways[1]:
            module = torch.compile(module, dynamic=True)

        def predict(values: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return module(torch.from_numpy(values)).numpy()  # type: ignore[no-any-return]

        return predict


FRAMEWORKS: dict[str, Networks] = {"keras": KerasNetworks(), "torch": TorchNetworks()}
