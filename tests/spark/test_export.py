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


def classifier(kind: str) -> Any:
    """Return a network on digits with weights that are not all alike."""
    import keras

    keras.utils.set_random_seed(1)
    image = keras.Input((64,), name="image")
    units, activation = {"softmax": (10, "softmax"), "logits": (10, None), "one": (1, "sigmoid")}[
        kind
    ]
    start = keras.initializers.RandomNormal(stddev=0.5)
    output = keras.layers.Dense(units, activation, kernel_initializer=start)(image)
    return keras.Model(image, output)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("softmax", {"probabilityCol": "probability"}),
        ("logits", {"probabilityCol": "probability", "rawPredictionCol": "raw"}),
        ("one", {"probabilityCol": "probability", "predictionCol": "class"}),
    ],
)
def test_columns_of_classes_are_those_of_transform(
    digits_df: Any, tmp_path: Path, kind: str, params: dict[str, str]
) -> None:
    """The class, probabilities and scores of the digits, by TensorFlow alone."""
    import tensorflow as tf

    given = TFTransformer.from_keras(classifier(kind), ["image"])
    transformer = given.copy({given.getParam(name): value for name, value in params.items()})
    rows = transformer.transform(digits_df).collect()
    transformer.export(tmp_path / "saved")
    serve = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
    scored = serve(image=tf.constant([row.image for row in rows], tf.float32))
    assert set(scored) == {"prediction", *params.values()} - (
        {"prediction"} if "predictionCol" in params else set()
    )
    assert {value.dtype for value in scored.values()} == {tf.float64}
    for name, value in scored.items():
        expected = np.array([np.asarray(row[name]) for row in rows])
        assert value.shape == expected.shape
        if expected.ndim == 1:
            assert len(np.unique(expected)) > 1
            np.testing.assert_array_equal(value, expected)
        else:
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_what_is_no_probability_is_an_error_of_the_call(tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    for units, given in ((3, 0.2), (1, 1.5)):
        value = keras.Input((units,), name="x")
        model = keras.Model(value, keras.layers.Activation("relu")(value))
        transformer = TFTransformer.from_keras(model, ["x"]).setProbabilityCol("p")
        transformer.export(tmp_path / "saved", mode="overwrite")
        serve = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
        right = tf.constant([[1.0 / units] * units])
        np.testing.assert_allclose(tf.reduce_sum(serve(x=right)["p"], axis=1), [1.0], rtol=1e-6)
        with pytest.raises(tf.errors.InvalidArgumentError, match="probabilities"):
            serve(x=tf.concat([right, tf.fill([1, units], given)], 0))
