"""Trains with the ways of synchronising that it is told of, one after the other.

A line of JSON on standard input asks for one: ``way`` (settings of ``sync`` as a dictionary),
``epochs``, ``validate``. A line of JSON on standard output answers with the epochs' records. The
arguments are the master, a private folder, and this host's address.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # some packages install "tests", too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.session import join

from horovod_spark_runner import run_training
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.estimator import parse_strategy
from tests.digits import load

WIDTH, BATCH, STEPS = 2200, 32, 16


def make_model() -> Any:
    """Return a network of five million weights."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    master, folder, address = sys.argv[1:]
    spark = join(master, address)
    images, labels = load()
    rows = [
        (image.tolist(), int(label), number % 6 == 0)
        for number, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    frame = spark.createDataFrame(rows, "image array<float>, digit int, held boolean")
    train, held = frame.filter("not held"), frame.filter("held")
    for line in sys.stdin:
        asked = json.loads(line)
        place = tempfile.mkdtemp(dir=folder)
        run_training(
            train,
            make_model,
            feature_cols=["image"],
            label_cols=["digit"],
            num_workers=2,
            batch_size=BATCH,
            epochs=asked["epochs"],
            steps_per_epoch=STEPS,
            validation=held if asked["validate"] else None,
            run_dir=place,
            sync=parse_strategy("sync", asked["way"]),
            stream_logs=False,
        )
        directory = RunDirectory(str(Path(place)))
        metrics = directory.read_metrics()
        answer = {"metrics": metrics, "accounts": directory.read_accounts(len(metrics))}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
