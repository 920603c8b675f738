"""Columns of strings, and transforms of any column, from training to prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataOptions, TFTransformer, run_training

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

COLOURS = ("red", "grün", "blue")
WORDS = ("good", "bad", "film", "a", "very")


def text_model() -> Any:
    import keras

    colour = keras.layers.Input((1,), dtype="string", name="colour")
    tags = keras.layers.Input((2,), dtype="string", name="tags")
    text = keras.layers.Input((), dtype="string", name="text")
    lookup = keras.layers.StringLookup(vocabulary=list(COLOURS), output_mode="one_hot")
    several = keras.layers.StringLookup(vocabulary=list(COLOURS), output_mode="multi_hot")
    vectorize = keras.layers.TextVectorization(
        vocabulary=list(WORDS), output_mode="int", output_sequence_length=6
    )
    embedded = keras.layers.Embedding(len(WORDS) + 2, 8)(vectorize(text))
    parts = [lookup(colour), several(tags), keras.layers.GlobalMaxPooling1D()(embedded)]
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()(parts))
    output = keras.layers.Dense(1, activation="sigmoid", name="liked")(hidden)
    model = keras.Model([colour, tags, text], output)
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"])
    return model


def test_models_of_strings_named_like_columns_are_trained_and_predict(
    spark: Any, tmp_path: Path
) -> None:
    import keras

    rows = []
    for number in range(203):
        colour = COLOURS[number % 3]
        # The number makes rows distinct: equal ones are all held out, or none.
        text = f"A very {'good' if number % 2 else 'bad'} film: {number}!"
        liked = int((number % 2 == 1) != (colour == "blue"))
        rows.append((colour, [colour, "red"], text, liked, number))
    schema = "colour string, tags array<string>, text string, liked int, id int"
    frame = spark.createDataFrame(rows, schema).repartition(3)
    trained = run_training(
        frame,
        text_model,
        num_workers=2,
        batch_size=16,
        epochs=12,
        validation=0.2,
        run_dir=str(tmp_path / "run"),
        stream_logs=False,
    )
    assert trained.summary.history[-1]["val_accuracy"] > 0.95
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["feature_cols"] == {"colour": "colour", "tags": "tags", "text": "text"}
    assert config["label_cols"] == ["liked"]
    new = frame.orderBy("id")
    predicted = [row.prediction for row in trained.transform(new).collect()]
    model = keras.saving.load_model(tmp_path / "run" / "model" / "model.keras")
    inputs = {
        "colour": keras.ops.convert_to_tensor([[row[0]] for row in rows]),
        "tags": keras.ops.convert_to_tensor([row[1] for row in rows]),
        "text": keras.ops.convert_to_tensor([row[2] for row in rows]),
    }
    np.testing.assert_allclose(predicted, model(inputs).numpy()[:, 0], atol=1e-5)
    loaded = TFTransformer.from_run(str(tmp_path / "run"))
    found = [row.prediction for row in loaded.transform(new).collect()]
    np.testing.assert_allclose(found, predicted, atol=1e-6)


def standardize(values: np.ndarray, generator: np.random.Generator | None) -> np.ndarray:
    values -= 50
    values /= 8
    return values


def is_large(value: np.ndarray, generator: np.random.Generator | None) -> Any:
    return bool(value >= 50)


def small_model() -> Any:
    import keras

    layers = [keras.layers.Input((2,)), keras.layers.Dense(1, activation="sigmoid")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
    return model


def test_transforms_of_numbers_equal_rows_made_so(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(101).selectExpr("array(float(id), float(100 - id)) as v", "int(id) as y")
    made = frame.selectExpr("transform(v, x -> float((x - 50) / 8)) as v", "int(y >= 50) as y")
    settings: dict[str, Any] = {
        "feature_cols": ["v"],
        "label_cols": ["y"],
        "num_workers": 2,
        "epochs": 3,
        "validation": frame,
        "stream_logs": False,
    }
    changed = run_training(
        frame,
        small_model,
        run_dir=str(tmp_path / "changed"),
        data=DataOptions(transforms={"v": standardize, "y": is_large}),
        **settings,
    )
    plain = run_training(
        made, small_model, run_dir=str(tmp_path / "plain"), **{**settings, "validation": made}
    )
    assert len(changed.summary.history) == 3
    for ours, theirs in zip(changed.summary.history, plain.summary.history, strict=True):
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)
    found = [row.prediction for row in changed.transform(frame).orderBy("y").collect()]
    expected = [row.prediction for row in plain.transform(made).collect()]
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-4)
