"""The small network that benchmarks train, its data, and how it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE = 24
# Times every image is there.
REPEAT = 20


class Rates(NamedTuple):
    """Samples per second of all ranks.

    Attributes:
        steps: in each epoch, from its first step to its results.
        whole: from the moment the model is made to the end of the last checkpoint.
        first: seconds from that moment to the end of the first step, where it is measured.
    """

    steps: list[float]
    whole: float
    first: float = 0.0


CNN, LINEAR = "cnn", "linear"


def make_network(name: str) -> Any:
    """Return the compiled Keras network of that name; `LINEAR` computes next to nothing."""
    import keras

    if name == CNN:
        return make_cnn()
    layers = [keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.layers.Input((SIDE, SIDE, 1)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def make_torch_network(name: str) -> Any:
    """Return the PyTorch module of that name, for images of (1, ``SIDE``, ``SIDE``)."""
    from torch import nn

    if name == CNN:
        return make_torch_cnn()
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 10))


def make_cnn(width: int = 1) -> Any:
    """Return a compiled network for grey images of ``SIDE`` x ``SIDE``, ``width`` times as wide."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((SIDE, SIDE, 1)),
            keras.layers.Conv2D(16 * width, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32 * width, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64 * width, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def seconds_of_training(
    frame: Any,
    make: Callable[[], Any],
    shape: tuple[int, ...],
    callbacks: Callable[[], list[Any]],
    folder: Path,
    epochs: int,
    batch_size: int,
) -> float:
    """Train with ``run_training`` on two ranks; return the seconds until the last checkpoint.

    Args:
        frame: rows of `make_frame`.
        make: makes the model, and notes when in ``made`` in the folder.
        shape: of an image.
        callbacks: as `run_training` takes them.
        folder: a private folder.
        epochs: how many.
        batch_size: rows of a rank in a step.
    """
    from horovod_spark_runner import DataOptions, run_training

    run_training(
        frame,
        make,
        feature_cols=["image"],
        label_cols=["label"],
        num_workers=2,
        batch_size=batch_size,
        epochs=epochs,
        run_dir=folder / "run",
        data=DataOptions(shapes={"image": shape}),
        callbacks=callbacks,
        stream_logs=False,
    )
    # Of the folder's renaming, once its files have reached the disk.
    saved = (folder / "run" / "checkpoints").rglob("*")
    return max(place.stat().st_ctime for place in saved) - float((folder / "made").read_text())


def waiting_layer(width: int, forward: float, backward: float) -> Any:
    """Return a layer that waits in place of computing, as a process does for a GPU.

    Args:
        width: it has this many inputs and outputs, and the square of it in weights.
        forward: seconds that it waits forwards.
        backward: seconds that it waits backwards, before there is a gradient of its weights.
    """
    import keras
    import tensorflow as tf

    def wait(tensor: Any, seconds: float) -> Any:
        def waited(array: Any) -> Any:
            time.sleep(seconds)
            return array

        result = tf.numpy_function(waited, [tensor], tensor.dtype)
        result.set_shape(tensor.shape)
        return result

    @tf.custom_gradient
    def passed(inputs: Any, kernel: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            upstream = wait(upstream, backward)
            return upstream, tf.fill(kernel.shape, tf.reduce_mean(upstream))

        return wait(inputs, forward), gradient

    class Waiting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(width, width), name="kernel")

        def call(self, inputs: Any) -> Any:
            return passed(inputs, tf.convert_to_tensor(self.kernel))

    return Waiting()


def make_torch_cnn() -> Any:
    """Return the same network as a PyTorch module, for images of (1, ``SIDE``, ``SIDE``)."""
    from torch import nn

    side = ((SIDE - 2) // 2 - 2) // 2
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * side * side, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Return images of shape (rows, SIDE, SIDE, 1), from 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    scale = SIDE // 8
    images = np.kron(digits.images, np.ones((1, scale, scale))).astype(np.float32) / 16
    return np.repeat(images[..., None], REPEAT, 0), np.repeat(digits.target, REPEAT).astype("i4")


def make_frame(images: np.ndarray, labels: np.ndarray, cores: int = 2) -> Any:
    """Return a cached DataFrame of what `make_arrays` returned, in a session of so many cores."""
    from peers.session import make_session

    return put_into_spark(make_session(cores, "2g"), images, labels)


def put_into_spark(spark: Any, images: np.ndarray, labels: np.ndarray) -> Any:
    """Return a cached DataFrame of what `make_arrays` returned."""
    import pyarrow as pa

    flat = pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), SIDE * SIDE)
    rows = pa.table({"image": flat.cast(pa.list_(pa.float32())), "label": labels})
    return spark.createDataFrame(rows.to_pandas()).repartition(4).cache()
