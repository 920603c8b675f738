"""Trainings whose ranks, on several hosts, step by themselves; see `function_job`."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from horovod_spark_runner import (
    AsyncServer,
    CheckpointOptions,
    LaunchOptions,
    RestartOptions,
    StalledError,
    TorchModel,
    run_training,
)

# Of 12 global batches both ranks have rows, of the last one only one has.
ROWS, BATCH, PARTS, EPOCHS = 193, 8, 25, 2


def keras_model() -> Any:
    """Return a model whose weights become larger by 1 in every step, whatever the rows."""
    import keras

    inputs = keras.layers.Input((4,))
    ones = keras.layers.Rescaling(0.0, 1.0)(inputs)
    count = keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")(ones)
    model = keras.Model(inputs, count)

    def up(y_true: Any, y_pred: Any) -> Any:
        return -keras.ops.sum(y_pred, axis=-1)

    def label(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.cast(y_true, "float32")

    model.compile(keras.optimizers.SGD(1.0), up, metrics=[label])
    return model


def torch_model() -> TorchModel:
    """Return a module that does so."""
    import torch

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.nn.Parameter(torch.zeros(5))

        def forward(self, x: Any) -> Any:
            return self.count.sum() + 0 * x.mean(1)

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 1.0)

    def up(output: Any, target: Any) -> Any:
        return -output.mean()

    def label(output: Any, target: Any) -> Any:
        return target.float().mean()

    return TorchModel(Counting(), up, sgd, metrics={"label": label})


def faults(run_dir: Path, kind: str) -> list[Any]:
    """Return a callback that kills rank 1 once after a checkpoint, or stops it."""
    import keras
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()

    class Fails(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            time.sleep(0.02 if rank else 0.005)  # rank 1 is slow
            done = run_dir / "done"
            if not rank or done.exists():
                return
            if kind == "stopped" and self.steps == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "killed" and list(run_dir.glob("checkpoints/step-*/checkpoint.json")):
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return [Fails()]


def counted(spark: Any, run_dir: str, kind: str) -> dict[str, Any]:
    """Train on counted steps, and say what came of it.

    Args:
        spark: session.
        run_dir: of the run.
        kind: ``"torch"``, which nothing disturbs; or what happens to rank 1 of one of Keras':
            ``"killed"`` or ``"stopped"``.
    """
    rows = [([1.0, 2.0, 3.0, float(number)], number) for number in range(ROWS)]
    frame = spark.createDataFrame(rows, "x array<float>, y int")
    given: dict[str, Any] = {}
    if kind != "torch":
        given["callbacks"] = partial(faults, Path(run_dir), kind)
    try:
        model = run_training(
            frame,
            torch_model if kind == "torch" else keras_model,
            feature_cols=["x"],
            label_cols=["y"],
            num_workers=2,
            batch_size=BATCH,
            epochs=EPOCHS,
            run_dir=run_dir,
            sync=AsyncServer(staleness=4),
            checkpoints=CheckpointOptions(every_steps=4),
            restarts=RestartOptions(max_restarts=int(kind == "killed"), backoff_seconds=0.1),
            launch=LaunchOptions(stall_timeout=6 if kind == "stopped" else None),
            stream_logs=False,
            **given,
        )
    except StalledError as error:
        return {"error": "StalledError", "message": str(error), "stacks": error.stacks}
    if kind == "torch":
        weights = model.getModel().count.detach().tolist()
    else:
        weights = model.getModel().get_weights()[0].ravel().tolist()
    return {
        "weights": weights,
        "labels": [logs["label"] for logs in model.summary.history],
        "endings": [attempt.ending for attempt in model.summary.attempts],
        "first_steps": [attempt.first_step for attempt in model.summary.attempts],
        "late": list(model.summary.staleness),
    }
