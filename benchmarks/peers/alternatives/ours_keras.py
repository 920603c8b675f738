"""``run_training`` with Keras: ours_keras.py PARQUET EPOCHS OUT."""

import functools
import json
import sys
import time
from pathlib import Path

from calls import note_call
from model import SIDE, make_cnn
from pyspark.sql import SparkSession

from horovod_spark_runner import DataOptions, run_training


def stopwatch(out):
    import keras

    class Stopwatch(keras.callbacks.Callback):
        seconds = ()

        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds = (*self.seconds, time.perf_counter() - self.began)
            Path(out).write_text(json.dumps(self.seconds))

    return [Stopwatch()]


if __name__ == "__main__":
    path, epochs, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    for call in range(2):
        began = time.perf_counter()
        run_training(
            path,
            make_cnn,
            feature_cols=["image"],
            label_cols=["label"],
            num_workers=2,
            batch_size=64,
            epochs=epochs,
            callbacks=functools.partial(stopwatch, out),
            data=DataOptions(shapes={"image": (SIDE, SIDE, 1)}),
            run_dir=f"{out}.run-{call}",
        )
        note_call(out, call, time.perf_counter() - began)
    spark.stop()
