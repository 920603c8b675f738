"""Models that take real rows only: trained by two ranks, and whatever becomes of them then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    DataOptions,
    TFTransformer,
    TorchModel,
    TorchTransformer,
    run_training,
)

from ..runs import arrays_in

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

LENGTH, WORDS = 6, 9


def attending() -> Any:
    """Return a network whose encoder fails on rows of padding alone."""
    import torch
    from torch import nn

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.words = nn.Embedding(WORDS, 8, padding_idx=0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
            self.head = nn.Linear(8, 1)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            found = self.encoder(self.words(words), src_key_padding_mask=words == 0)
            made: torch.Tensor = self.head(found[:, 0])
            return made

    return TorchModel(Attending(), "MSELoss", torch.optim.SGD)


def packing() -> Any:
    """Return a network that refuses a row of padding alone."""
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence

    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.words = nn.Embedding(WORDS, 8)
            self.lstm = nn.LSTM(8, 5, batch_first=True)
            self.head = nn.Linear(5, 1)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            lengths = (words != 0).sum(1).cpu()
            packed = pack_padded_sequence(
                self.words(words), lengths, batch_first=True, enforce_sorted=False
            )
            made: torch.Tensor = self.head(self.lstm(packed)[1][0][0])
            return made

    return TorchModel(Packing(), "MSELoss", torch.optim.SGD)


def parsing() -> Any:
    """Return a network that takes text of numbers only."""
    import keras
    import tensorflow as tf

    @keras.saving.register_keras_serializable("tests")
    class Numbers(keras.layers.Layer):
        def call(self, text: Any) -> Any:
            return tf.strings.to_number(text)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    text = keras.Input((1,), dtype="string")
    model = keras.Model(text, keras.layers.Dense(1)(Numbers()(text)))
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def sentences(spark: Any) -> Any:
    """25 rows of words: two ranks have a last step in which one has no row."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(25):
        words = random.integers(1, WORDS, 1 + number % LENGTH).tolist()
        padded = words + [0] * (LENGTH - len(words))
        rows.append((number, padded, str(number / 10), float(np.mean(words))))
    return spark.createDataFrame(rows, "id long, words array<long>, text string, y float").cache()


def trained(frame: Any, run: Path, model_fn: Any, column: str, **arguments: Any) -> Any:
    return run_training(
        frame,
        model_fn,
        feature_cols=[column],
        label_cols=["y"],
        num_workers=2,
        batch_size=4,
        epochs=1,
        run_dir=str(run),
        stream_logs=False,
        **arguments,
    )


def predictions(transformer: Any, frame: Any) -> list[float]:
    rows = transformer.transform(frame).orderBy("id").collect()
    return [float(np.reshape(row.prediction, -1)[0]) for row in rows]


@pytest.mark.thorough
@pytest.mark.parametrize("model_fn", [attending, packing])
def test_padding_is_skipped_by_a_module(sentences: Any, tmp_path: Path, model_fn: Any) -> None:
    """Also in a step in which a rank has no row, read again, and given by itself."""
    import torch

    transformer = trained(sentences, tmp_path / "run", model_fn, "words")
    found = predictions(transformer, sentences)
    assert np.isfinite(found).all()
    rebuilt = TorchTransformer.from_run(tmp_path / "run", model_fn=model_fn)
    assert predictions(rebuilt, sentences) == pytest.approx(found, abs=1e-6)
    loss = rebuilt.evaluate(sentences, label_cols=["y"])["loss"]
    expected = [row.y for row in sentences.orderBy("id").collect()]
    assert loss == pytest.approx(np.mean(np.square(np.subtract(found, expected))), rel=1e-5)
    words = np.array([row.words for row in sentences.orderBy("id").collect()])
    kept = arrays_in(tmp_path / "run" / "model" / "sample.npz")["input/words"]
    assert all((words == row).all(1).any() for row in kept)
    module = model_fn().module.eval()
    alone = TorchTransformer.from_module(module, ["words"], example=torch.tensor(words[:3]))
    with torch.no_grad():
        given = module(torch.tensor(words))[:, 0].numpy()
    assert predictions(alone, sentences) == pytest.approx(given, abs=1e-6)
    if model_fn is attending:
        rebuilt.export(tmp_path / "program.pt2")
        program = TorchTransformer.from_exported(tmp_path / "program.pt2", ["words"], trusted=True)
        assert predictions(program, sentences) == pytest.approx(found, abs=1e-6)


def test_text_is_made_numbers(sentences: Any, tmp_path: Path) -> None:
    transformer = trained(sentences, tmp_path / "run", parsing, "text")
    found = predictions(transformer, sentences)
    assert np.isfinite(found).all()
    rebuilt = TFTransformer.from_run(tmp_path / "run", model_fn=parsing)
    assert predictions(rebuilt, sentences) == pytest.approx(found, abs=1e-6)
    assert set(rebuilt.evaluate(sentences, label_cols=["y"])) == {"loss"}


def test_no_row_is_kept_with_the_model(sentences: Any, tmp_path: Path) -> None:
    """``keep_data=False`` says so; what the training knows of the model is enough to predict."""
    data = DataOptions(keep_data=False)
    transformer = trained(sentences, tmp_path / "run", parsing, "text", data=data)
    assert np.isfinite(predictions(transformer, sentences)).all()
    assert not (tmp_path / "run" / "model" / "sample.npz").exists()
