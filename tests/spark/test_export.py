"""Exports on real DataFrames: with TensorFlow alone they give what `transform` does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import TFTransformer
from horovod_spark_runner.data.manifest import Column

from ..runs import save_run

pytestmark = pytest.mark.spark

COLUMNS = [
    Column("picture", "uint8", (4, 5, 3), "image"),
    Column("name", "string"),
    Column("price", "float32"),
    Column("parts", "float32", (3,)),
]


def model_of_columns() -> Any:
    import keras
    from keras import layers

    picture = keras.Input((4, 5, 3), name="picture")
    name = keras.Input((1,), name="name", dtype="string")
    price, parts = keras.Input((1,), name="price"), keras.Input((3,), name="parts")
    known = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(name)
    seen = layers.Flatten()(layers.Rescaling(1 / 255)(picture))
    joined = layers.Concatenate()([seen, known, price, layers.BatchNormalization()(parts)])
    outputs = {
        "score": layers.Dense(1)(layers.Dropout(0.5)(joined)),
        "shares": layers.Dense(3, "softmax")(joined),
    }
    model = keras.Model({"picture": picture, "name": name, "price": price, "parts": parts}, outputs)
    model.compile("sgd", "mse")
    return model


def encoded(pixels: np.ndarray, form: str) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


@pytest.mark.thorough
def test_an_export_gives_what_transform_gives(spark: Any, tmp_path: Path) -> None:
    import tensorflow as tf
    from PIL import Image
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    generator = np.random.default_rng(0)
    rows = [
        (
            encoded(generator.integers(0, 256, (4, 5, 3), np.uint8), "JPEG" if i % 2 else "PNG"),
            "abc"[i % 3],
            float(generator.normal()),
            [float(v) for v in generator.normal(size=3)],
        )
        for i in range(11)
    ]
    given = spark.createDataFrame(
        rows, "picture binary, name string, price double, raw array<double>"
    )
    frame = given.withColumn("parts", array_to_vector(F.col("raw"))).drop("raw").cache()
    save_run(tmp_path / "run", model_of_columns(), COLUMNS)
    transformer = TFTransformer.from_run(tmp_path / "run", prediction_col={"score": "the score"})
    expected = transformer.transform(frame).collect()
    transformer.export(tmp_path / "saved")
    scored = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"](
        picture=np.stack([np.array(Image.open(io.BytesIO(row.picture))) for row in expected]),
        name=tf.constant([row.name for row in expected]),
        price=tf.constant([row.price for row in expected], tf.float32),
        parts=tf.constant([list(row.parts) for row in expected], tf.float32),
    )
    np.testing.assert_allclose(
        scored["the score"][:, 0], [row["the score"] for row in expected], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        scored["shares"], [row.shares for row in expected], rtol=1e-5, atol=1e-6
    )
    # Read back, it takes the same columns, and images of any size.
    other = encoded(np.full((9, 9, 3), 100, np.uint8), "BMP")
    more = frame.union(
        spark.createDataFrame([(other, "a", 1.0, rows[0][3])], given.schema)
        .withColumn("parts", array_to_vector(F.col("raw")))
        .drop("raw")
    )
    read = TFTransformer.from_saved_model(tmp_path / "saved")
    again = read.transform(more).collect()
    whole = transformer.transform(more).collect()
    for one, two in zip(again, whole, strict=True):
        assert one["the score"] == pytest.approx(two["the score"], rel=1e-5, abs=1e-6)
        assert one.shares == pytest.approx(two.shares, rel=1e-5, abs=1e-6)
    frame.unpersist()
