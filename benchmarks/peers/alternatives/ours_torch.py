"""``run_training`` with PyTorch: ours_torch.py PARQUET EPOCHS OUT."""

import json
import sys
import time
from pathlib import Path

from calls import note_call
from model import SIDE, make_torch_cnn
from pyspark.sql import SparkSession

from horovod_spark_runner import DataOptions, TorchCallback, TorchModel, run_training


def make_model():
    import torch

    return TorchModel(make_torch_cnn(), "CrossEntropyLoss", torch.optim.Adam)


class Stopwatch(TorchCallback):
    seconds = ()

    def __init__(self, out):
        self.out = out

    def on_epoch_begin(self, epoch):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs):
        self.seconds = (*self.seconds, time.perf_counter() - self.began)
        Path(self.out).write_text(json.dumps(self.seconds))


if __name__ == "__main__":
    path, epochs, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    for call in range(2):
        began = time.perf_counter()
        run_training(
            path,
            make_model,
            feature_cols=["image"],
            label_cols=["label"],
            num_workers=2,
            batch_size=64,
            epochs=epochs,
            callbacks=[Stopwatch(out)],
            data=DataOptions(shapes={"image": (1, SIDE, SIDE)}),
            run_dir=f"{out}.run-{call}",
        )
        note_call(out, call, time.perf_counter() - began)
    spark.stop()
