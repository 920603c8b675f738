"""Predicting with a model that was just trained: nothing of it is built again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    CheckpointOptions,
    DataOptions,
    ModelError,
    RunDirectoryError,
    TFTransformer,
    run_training,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.training.trained_model import read_model

from ..trainings import digits_model, train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return shares


def test_validation_gives_what_evaluating_gives(digits_df: Any, tmp_path: Path) -> None:
    """With a loss, a metric and sample weights of the user's own module, by their defaults."""

    def model_fn() -> Any:
        import keras

        def surprise(y_true: Any, y_pred: Any) -> Any:
            return keras.losses.sparse_categorical_crossentropy(y_true, y_pred) ** 2

        regularizer = keras.regularizers.L2(0.01)
        layer = keras.layers.Dense(10, "softmax", kernel_regularizer=regularizer)
        model = keras.Sequential([keras.Input((64,)), layer])
        top = keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")
        iou = keras.metrics.MeanIoU(10, sparse_y_pred=False, name="iou")
        model.compile("adam", surprise, metrics=[top, iou], weighted_metrics=["acc"])
        return model

    frame = digits_df.filter("id < 300").selectExpr("*", "id % 3 as weight", "id % 4 = 0 as held")
    transformer = run_training(
        frame,
        model_fn,
        feature_cols=["image"],
        label_cols=["digit"],
        sample_weight_col="weight",
        validation="held",
        num_workers=2,
        epochs=2,
        batch_size=16,
        run_dir=str(tmp_path / "run"),
        stream_logs=False,
    )
    last = transformer.summary.history[-1]
    expected = {n.removeprefix("val_"): v for n, v in last.items() if n.startswith("val_")}
    assert set(expected) == {"loss", "top3", "iou", "acc"}
    assert transformer.evaluate(frame.filter("held")) == pytest.approx(expected, abs=1e-6)


@pytest.mark.thorough
def test_a_run_leaves_a_saved_model(digits_df: Any, tmp_path: Path) -> None:
    """If asked for; where it is not, none of earlier weights stays."""
    import tensorflow as tf

    frame, run = digits_df.filter("id < 200"), tmp_path / "run"
    wanted = CheckpointOptions(saved_model=True)
    transformer = train(frame, run, epochs=1, checkpoints=wanted, prediction_col="share")
    assert not [path for path in run.iterdir() if path.name.startswith(".saved_model")]
    call = tf.saved_model.load(str(run / "saved_model")).signatures["serving_default"]
    rows = transformer.transform(frame).collect()
    given = tf.constant(np.array([row.image for row in rows], np.float32))
    np.testing.assert_allclose(
        call(image=given)["share"], [row.share for row in rows], rtol=1e-5, atol=1e-6
    )
    train(frame, run, epochs=2)
    assert not (run / "saved_model").exists()


@pytest.mark.thorough
def test_what_no_saved_model_can_be_is_refused_before_the_first_step(
    digits_df: Any, tmp_path: Path
) -> None:
    frame, wanted = digits_df.filter("id < 200"), CheckpointOptions(saved_model=True)
    data = DataOptions(transforms={"image": lambda value, rng: value / 2})
    with pytest.raises(ModelError, match="'image'.*transform"):
        train(frame, tmp_path / "transform", checkpoints=wanted, data=data)

    def eager() -> Any:
        model = digits_model()
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        return model

    with pytest.raises(ModelError, match="run_eagerly=True"):
        train(frame, tmp_path / "eager", checkpoints=wanted, model_fn=eager)
    assert not (tmp_path / "eager" / "checkpoints").exists()


@pytest.mark.thorough
def test_model_fn_is_not_called_to_predict(digits_df: Any, tmp_path: Path) -> None:
    """It asks Horovod for its size, reads a file that is gone later, and has parts of its own."""
    token = tmp_path / "token"
    token.write_text("2.0")

    def model_fn() -> Any:
        import horovod.tensorflow as hvd
        import keras

        class Scale(keras.layers.Layer):
            def __init__(self, by: float, **arguments: Any) -> None:
                super().__init__(**arguments)
                self.by = by

            def call(self, x: Any) -> Any:
                return x * self.by

            def get_config(self) -> dict[str, Any]:
                return {**super().get_config(), "by": self.by}

        layers = [
            keras.Input((64,)),
            Scale(float(token.read_text())),
            keras.layers.Lambda(lambda x: keras.ops.square(x)),
            keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ]
        keras.config.set_image_data_format("channels_first")
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.01 * hvd.size()), "sparse_categorical_crossentropy")
        return model

    frame = digits_df.filter("id < 200")
    transformer = run_training(
        frame,
        model_fn,
        feature_cols=["image"],
        label_cols=["digit"],
        num_workers=2,
        run_dir=str(tmp_path / "run"),
        prediction_col="scores",
        stream_logs=False,
    )
    token.unlink()
    rows = transformer.transform(frame).collect()
    with np.load(tmp_path / "run" / "model" / "weights.npz") as file:
        kernel, bias = file["00000"], file["00001"]
    images = np.array([row.image for row in rows])
    expected = softmax((images * 2) ** 2 @ kernel + bias)
    np.testing.assert_allclose([row.scores for row in rows], expected, atol=1e-5)
    signature = read_model(RunDirectory(str(tmp_path / "run"))).signature
    assert signature.own["self_contained"] is False
    assert signature.own["state"]["image_data_format"] == "channels_first"
    with pytest.raises(RunDirectoryError, match="'Scale'.*'scale'"):
        TFTransformer.from_run(str(tmp_path / "run"))
