"""Train on a cluster and write what came of it as JSON; for spark-submit.

Usage: job.py RESULT REQUEST; REQUEST is a JSON object: ``run_dir``, and what else `main` reads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from horovod_spark_runner import (
    CheckpointOptions,
    HorovodSparkError,
    LaunchOptions,
    RestartOptions,
    run_training,
)

ROWS = 160
STEPS = 10  # of an epoch, with 2 ranks


def model_fn() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mean_squared_error")
    return model


def make_callbacks(act: dict[str, Any]) -> Any:
    """Return a function that makes the callbacks of a rank.

    Args:
        act: what a rank does in the first step after ``step`` steps: ``wait`` (each rank, in every
            step, until there is a file ``go``) or ``eat`` memory. ``folder`` is where ranks leave
            ``rank-N`` then; with that file there, they do nothing any more.
    """

    def make() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        folder = Path(act["folder"])

        class Act(keras.callbacks.Callback):
            def __init__(self) -> None:
                super().__init__()
                self.steps = 0
                self.eaten: list[bytearray] = []
                self.mark = folder / f"rank-{hvd.rank()}"
                self.over = self.mark.exists()

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                self.steps += 1
                if self.over or self.steps <= act["step"]:
                    return
                if not self.mark.exists():
                    print(f"rank {hvd.rank()} of {os.getpid()} acts", flush=True)
                    self.mark.write_text(str(os.getpid()))
                if act["what"] == "eat" and hvd.rank() == 1:
                    while len(self.eaten) < 48:  # 3 GiB: more than the container, no more than that
                        self.eaten.append(bytearray(b"x" * 2**26))
                        time.sleep(0.02)
                while act["what"] == "wait" and not (folder / "go").exists():
                    time.sleep(0.1)

        return [Act()]

    return make


def main() -> None:
    result, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    spark = SparkSession.builder.appName("test").getOrCreate()
    answer: dict[str, Any] = {
        "application": spark.sparkContext.applicationId,
        "user": spark.sparkContext.sparkUser(),
        "python": sys.executable,
    }
    frame = spark.range(0, ROWS, 1, 2).selectExpr(
        "id", "array(float(id % 2), float(id % 3), float(id % 5), 1.0f) as x", "float(id % 7) as y"
    )
    try:
        model = run_training(
            frame,
            model_fn,
            feature_cols=["x"],
            label_cols=["y"],
            num_workers=request.get("num_workers", 2),
            batch_size=8,
            epochs=request.get("epochs", 2),
            run_dir=request["run_dir"],
            checkpoints=CheckpointOptions(every_steps=4),
            callbacks=make_callbacks(request["act"]) if "act" in request else None,
            restarts=RestartOptions(max_restarts=request.get("restarts", 0), backoff_seconds=0.1),
            gpus_per_worker=request.get("gpus", 0),
            launch=LaunchOptions(start_timeout=request.get("start_timeout", 120)),
        )
        answer["hosts"] = [rank.host for rank in model.summary.placement]
        answer["gpus"] = [list(rank.gpus) for rank in model.summary.placement]
        answer["loss"] = [epoch["loss"] for epoch in model.summary.history]
        if request.get("transform", True):
            answer["predicted"] = model.transform(frame).where("prediction is not null").count()
    except HorovodSparkError as error:
        answer["error"], answer["message"] = type(error).__name__, str(error)
    result.write_text(json.dumps(answer))
    spark.stop()


if __name__ == "__main__":
    main()
