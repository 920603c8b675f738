"""The driver never loads a framework, and users of one do not need the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.absent import without

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

DRIVER = """
import json, sys
from pyspark.sql import SparkSession
from horovod_spark_runner import CheckpointOptions, DataOptions, HorovodRunner, TFTransformer
from horovod_spark_runner import prepare_dataset, run_training

def model_fn():
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model

def callbacks():
    import keras

    return [keras.callbacks.TerminateOnNaN()]

def loaded():
    return sorted({name.partition(".")[0] for name in sys.modules} & set(HEAVY))

HEAVY = ["horovod", "keras", "mpi4py", "tensorflow", "torch"]
folder = sys.argv[1]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
df = spark.range(64).selectExpr("array(id / 64, 1 - id / 64) as x", "float(id) as y")

def train(name, model, **more):
    return run_training(
        df, model, feature_cols=["x"], label_cols=["y"], num_workers=2, batch_size=8, epochs=1,
        run_dir=f"{folder}/{name}", stream_logs=False, **more,
    )

found = {}
trained = train(
    "first", model_fn, validation=0.25, callbacks=callbacks,
    checkpoints=CheckpointOptions(best_metric="val_mae"),
    data=DataOptions(materializer="petastorm"),
)
found["a training"] = loaded()
train(
    "warm", f"{folder}/first/model/model.keras", initial_weights=f"{folder}/first",
    lr_scaling="linear", warmup_epochs=1.0, data=DataOptions(materializer="spark"),
)
found["a model file, and weights of another run"] = loaded()
trained.transform(df).collect()
trained.write().overwrite().save(f"{folder}/stage")
TFTransformer.load(f"{folder}/stage").transform(df).collect()
TFTransformer.from_run(f"{folder}/warm").transform(df).collect()
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("torch is there")
found["predictions"] = loaded()
data = prepare_dataset(df, ["x", "y"], data_dir=f"{folder}/data")

def count(data):
    import horovod.tensorflow

    batches = data.epoch(0, rank=0, size=1, batch_size=9)
    return sum(len(batch["y"]) for batch in batches), loaded()

rows, ranks = HorovodRunner(1, stream_logs=False).run(count, data).result
found["a function"] = loaded()
spark.stop()
print(json.dumps([found, ranks, rows]))
"""


def test_the_driver_loads_no_framework(tmp_path: Path) -> None:
    """Also where PyTorch, which Horovod was built for, is not installed."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=560,
        env=without("torch", "torchmetrics", "lightning"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    driver, ranks, rows = json.loads(done.stdout.splitlines()[-1])
    assert len(driver) == 4
    assert {what: modules for what, modules in driver.items() if modules} == {}
    # Which is where they are.
    assert set(ranks) == {"horovod", "keras", "mpi4py", "tensorflow"}
    assert rows == 64
