"""Train a small transformer on text with Keras, on two ranks of a local Spark.

It tells which of four packages a paragraph of the standard library's documentation is from. Run it
with ``python examples/text_keras.py --workers 2``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from library_texts import load_texts
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from horovod_spark_runner import TFTransformer, run_training

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PACKAGES = ("asyncio", "email", "logging", "xml")
LENGTH, WIDTH = 48, 64


def make_model(vocabulary: Sequence[str]) -> Any:
    """Return the compiled network; called on every worker."""
    import keras
    from keras import layers, ops

    text = keras.Input((), dtype="string", name="text")
    tokens = layers.TextVectorization(vocabulary=vocabulary, output_sequence_length=LENGTH)(text)
    present = ops.not_equal(tokens, 0)  # the others are padding
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    embedded = layers.Embedding(len(vocabulary) + 2, WIDTH)(tokens)  # padding, unknown words
    embedded += layers.Embedding(LENGTH, WIDTH)(positions)
    attended = layers.MultiHeadAttention(4, WIDTH // 4)(embedded, embedded, value_mask=present)
    hidden = layers.LayerNormalization()(embedded + attended)
    expanded = layers.Dense(2 * WIDTH, activation="gelu")(hidden)
    hidden = layers.LayerNormalization()(hidden + layers.Dense(WIDTH)(expanded))
    pooled = layers.GlobalAveragePooling1D()(hidden)
    shares = layers.Dense(len(PACKAGES), activation="softmax")(layers.Dropout(0.2)(pooled))
    model = keras.Model(text, shares)
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def count_words(df: DataFrame, limit: int = 5000) -> list[str]:
    """Return the most frequent words, split as ``TextVectorization`` does. Spark counts them."""
    plain = F.regexp_replace(F.lower("text"), r"\p{Punct}", "")
    words = df.select(F.explode(F.split(plain, r"\s+")).alias("word")).where("word != ''")
    frequent = words.groupBy("word").count().orderBy(F.desc("count"), "word").limit(limit)
    return [row["word"] for row in frequent.collect()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a transformer on text with Keras.")
    parser.add_argument("--workers", type=int, default=2, help="ranks (2)")
    parser.add_argument("--epochs", type=int, default=6, help="epochs (6)")
    parser.add_argument("--run-dir", default="runs/text-keras", help="run directory")
    arguments = parser.parse_args()
    session = SparkSession.builder.master(f"local[{arguments.workers}]").appName("text")
    spark = session.config("spark.ui.showConsoleProgress", "false").getOrCreate()

    train, test = load_texts(spark, PACKAGES).randomSplit([0.8, 0.2], seed=7)
    model = run_training(
        train,
        functools.partial(make_model, count_words(train)),
        feature_cols=["text"],
        label_cols=["label"],
        num_workers=arguments.workers,
        epochs=arguments.epochs,
        batch_size=16,
        run_dir=arguments.run_dir,
    )
    print(f"Held-out accuracy: {model.evaluate(test)['accuracy']:.3f}")

    classifier = TFTransformer.from_run(arguments.run_dir, probability_col="probability")
    new = spark.createDataFrame([("Parse the header of a message.",)], "text string")
    for row in classifier.transform(new).collect():
        print(f"{row['text']} -> {PACKAGES[int(row['prediction'])]}")
    model.export(f"{arguments.run_dir}/exported")
    print(f"For TensorFlow alone: {arguments.run_dir}/exported")
    spark.stop()


if __name__ == "__main__":
    main()
