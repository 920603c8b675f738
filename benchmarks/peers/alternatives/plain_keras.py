"""Keras in one process: plain_keras.py PARQUET EPOCHS OUT."""

import json
import sys
import time
from pathlib import Path

import keras
import pyarrow.parquet as pq
from model import SIDE, make_cnn


class Stopwatch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.began)


if __name__ == "__main__":
    path, epochs, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    table = pq.read_table(path)
    images = table["image"].combine_chunks().flatten().to_numpy().reshape(-1, SIDE, SIDE, 1)
    stopwatch = Stopwatch()
    model = make_cnn()
    model.fit(
        images, table["label"].to_numpy(), batch_size=128, epochs=epochs, verbose=0,
        callbacks=[stopwatch],
    )  # fmt: skip
    model.save(f"{out}.keras")
    Path(out).write_text(json.dumps(stopwatch.seconds))
