"""Trains a network, or adds up as many numbers as it has weights, each time it is asked.

A line of JSON on standard input asks: ``what`` (``"train"`` or ``"sum"``), ``network`` (a name of
`NETWORKS`), ``meeting`` (whether ranks exchange gradients), ``bucket_bytes`` (``null`` for what is
usual). A line of JSON on standard output answers with seconds per step, or per sum. The arguments
are the master, a private folder, and this host's address.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import waiting_layer
from peers.session import join

from horovod_spark_runner import Allreduce, HorovodRunner, LocalSGD, run_training
from horovod_spark_runner.checkpoint.run_directory import RunDirectory

BATCH, STEPS, EPOCHS, SUMS = 32, 16, 3, 10
WIDTH, LAYERS = 725, 10
# Seconds that a layer waits in place of computing, forwards and backwards.
FORWARD, BACKWARD = 0.010, 0.020


def dense_layers() -> Any:
    """Return a network of five million weights that computes."""
    import keras

    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    return keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(1)])


def waiting_layers() -> Any:
    """Return a network of five million weights that waits, as for a GPU."""
    import keras

    layers = [waiting_layer(WIDTH, FORWARD, BACKWARD) for _ in range(LAYERS)]
    return keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(1)])


NETWORKS: dict[str, Callable[[], Any]] = {"dense": dense_layers, "waiting": waiting_layers}


def make_model(network: str, bucket_bytes: int | None) -> Any:
    """Return a network, on a rank whose gradients leave in such buckets."""
    import keras

    from horovod_spark_runner.sync import allreduce

    if bucket_bytes is not None:
        allreduce.BUCKET_BYTES = bucket_bytes
    keras.utils.set_random_seed(1)
    model = NETWORKS[network]()
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


def seconds_of_sum() -> float:
    """Return what adding up as many numbers as there are weights takes by itself."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    values = [tf.zeros((WIDTH, WIDTH))] * LAYERS
    took = []
    for _ in range(SUMS):
        hvd.allreduce(tf.zeros(1), name="ready")
        began = time.perf_counter()
        hvd.grouped_allreduce(values, op=hvd.Sum, name="values")
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    master, folder, address = sys.argv[1:]
    spark = join(master, address)
    column = f"transform(sequence(1, {WIDTH}), i -> cast(sin(id * i) as float)) as x"
    frame = spark.range(2 * BATCH * STEPS).selectExpr(column, "rand(9) as y")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["what"] == "sum":
            answer = HorovodRunner(num_workers=2).run(seconds_of_sum).result
        else:
            place = tempfile.mkdtemp(dir=folder)
            run_training(
                frame,
                functools.partial(make_model, asked["network"], asked["bucket_bytes"]),
                feature_cols=["x"],
                label_cols=["y"],
                num_workers=2,
                batch_size=BATCH,
                epochs=EPOCHS,
                run_dir=place,
                # Ranks that never meet but at the end of an epoch.
                sync=Allreduce() if asked["meeting"] else LocalSGD(every=STEPS),
                stream_logs=False,
            )
            accounts = RunDirectory(place).read_accounts(EPOCHS)[1:]
            answer = statistics.median(
                2 * BATCH / account["samples_per_second"] for account in accounts
            )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
