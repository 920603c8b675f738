"""A Horovod training loop as one writes it by hand, on arrays in memory; run by mpirun.

Usage: python training_loop.py ARRAYS.npz EPOCHS BATCH_SIZE NETWORK; rank 0 prints JSON: samples per
second of all ranks in each epoch, from its first step to its results, and of the whole training
with a checkpoint of weights and optimizer on the disk after each epoch; the seconds to the end of
the first step. Both of the latter begin when the model is made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import make_network


def main() -> None:
    hvd.init()
    arrays = np.load(sys.argv[1])
    epochs, batch_size = int(sys.argv[2]), int(sys.argv[3])
    images = arrays["images"][hvd.rank() :: hvd.size()]
    labels = arrays["labels"][hvd.rank() :: hvd.size()]
    model = make_network(sys.argv[4])
    started = time.perf_counter()
    optimizer, metrics = model.optimizer, [tf.keras.metrics.Mean()]
    metrics.append(tf.keras.metrics.SparseCategoricalAccuracy())
    optimizer.build(model.trainable_variables)
    loss_function = tf.keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = loss_function(y, predicted)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(hvd.grouped_allreduce(gradients), model.trainable_variables)
        metrics[0].update_state(loss)
        metrics[1].update_state(y, predicted)

    for variable in (*model.variables, *optimizer.variables):
        variable.assign(hvd.broadcast(tf.convert_to_tensor(variable), root_rank=0))
    generator = np.random.default_rng(hvd.rank())
    steps = len(images) // batch_size
    rates = []
    first = 0.0
    for epoch in range(epochs):
        began = time.perf_counter()
        order = generator.permutation(len(images))
        for number in range(steps):
            rows = order[number * batch_size : (number + 1) * batch_size]
            step(tf.constant(images[rows]), tf.constant(labels[rows]))
            if not first:
                first = time.perf_counter() - started
        values = [float(metric.result()) for metric in metrics]
        assert np.isfinite(values).all()
        seconds = time.perf_counter() - began
        rates.append(steps * batch_size * hvd.size() / seconds)
        if hvd.rank() == 0:
            values = [np.asarray(v) for v in (*model.variables, *optimizer.variables)]
            with Path(sys.argv[1]).with_name(f"checkpoint-{epoch}.npz").open("wb") as stream:
                np.savez(stream, *values)
                stream.flush()
                os.fsync(stream.fileno())
    whole = epochs * steps * batch_size * hvd.size() / (time.perf_counter() - started)
    if hvd.rank() == 0:
        print(json.dumps({"steps": rates, "whole": whole, "first": first}), flush=True)


if __name__ == "__main__":
    main()
