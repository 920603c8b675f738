"""What a slow rank costs the others: where ranks step together, and where they do not.

Eight ranks train a small network whose steps wait, as for a GPU, because eight ranks that compute
would only measure this machine's cores; one of them waits four times as long, or none does. Told is
how long an epoch takes, which has the same rows in both. Run it with
``python benchmarks/stragglers.py``; ``--write`` puts the result into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from typing import Any

from report import GOAL_HEAD, goal, present, shown_command, table

from horovod_spark_runner import Allreduce, AsyncServer, LocalSGD, run_training
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from tests.digits import load

RANKS, BATCH, STEPS, EPOCHS = 8, 16, 40, 4
WAIT, SLOWER = 0.05, 4
WAYS: dict[str, Any] = {
    "`Allreduce()`": Allreduce(),
    "`LocalSGD(every=8)`": LocalSGD(every=8),
    "`AsyncServer()`": AsyncServer(),
}


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((64,)), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential(layers)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def waits(slow: bool) -> list[Any]:
    """Return a callback that waits in each step, on the last rank longer if it is to be slow."""
    import keras
    from mpi4py import MPI

    longer = slow and MPI.COMM_WORLD.Get_rank() == RANKS - 1

    class Waits(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(WAIT * (SLOWER if longer else 1))

    return [Waits()]


def epoch_seconds(frame: Any, way: Any, slow: bool) -> tuple[float, list[int]]:
    """Return the seconds of an epoch but the first, and how late updates came."""
    with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
        run = run_training(
            frame,
            make_model,
            feature_cols=["image"],
            label_cols=["digit"],
            num_workers=RANKS,
            batch_size=BATCH,
            epochs=EPOCHS,
            steps_per_epoch=STEPS,
            callbacks=partial(waits, slow),
            run_dir=folder,
            sync=way,
            stream_logs=False,
        )
        accounts = RunDirectory(folder).read_accounts(EPOCHS)
    rows = RANKS * BATCH * STEPS
    seconds = [rows / account["samples_per_second"] for account in accounts[1:] if account]
    return statistics.median(seconds), list(run.summary.staleness)


def measure() -> str:
    """Return the tables."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master(f"local[{RANKS}]").config("spark.ui.enabled", "false")
    spark = session.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    rows = [(image.tolist(), int(label)) for image, label in zip(*load(), strict=True)]
    frame = spark.createDataFrame(rows, "image array<float>, digit int").coalesce(2).cache()
    epoch_seconds(frame, WAYS["`Allreduce()`"], False)  # which imports the framework
    lines, ratios, late = [], {}, []
    for name, way in WAYS.items():
        even, _ = epoch_seconds(frame, way, False)
        uneven, late = epoch_seconds(frame, way, True)
        ratios[name] = uneven / even
        lines.append([name, f"{even:.2f} s", f"{uneven:.2f} s", f"{uneven / even:.2f}"])
        print(*lines[-1], flush=True)
    spark.stop()
    *_, last = WAYS
    head = ["`sync`", "all alike", f"one {SLOWER} times slower", "ratio"]
    most = max(number for number, count in enumerate(late) if count)
    return (
        f"{table(head, lines)}\n\n"
        f"With `AsyncServer()` and a slow rank, updates came {statistics.mean(_each(late)):.1f} "
        f"updates of others late on average, and {most} at most.\n\n"
        + table(GOAL_HEAD, [goal(f"{last}: slow / alike", ratios[last], at_most=1.3)])
    )


def _each(late: list[int]) -> list[int]:
    return [number for number, count in enumerate(late) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    text = (
        f"{RANKS} ranks whose steps of {BATCH} rows wait {1000 * WAIT:.0f} ms, and {STEPS} times "
        f"{RANKS} of them in an epoch; seconds of an epoch, the median of {EPOCHS - 1}. Were work "
        f"shared out without any loss, the ratio would be "
        f"{RANKS / (RANKS - 1 + 1 / SLOWER):.2f}.\n\n{measure()}"
    )
    present("A slow rank", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
