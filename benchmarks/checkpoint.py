"""What checkpoints cost a training, and how soon a killed one takes its next step.

Two ranks train with a checkpoint every 100 steps. The 50 steps after one was due, its stop and the
writing in the background included, are compared with the 50 steps after those: the slowdown of a
run with a checkpoint every 50 steps, pair by pair, within one run and so under one load. Then
rank 1 is killed in the middle, and the time until the first step of the restarted run is taken.
Run it with ``python benchmarks/checkpoint.py``; ``--write`` puts the result into
``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model import SIDE, make_arrays, make_cnn, make_frame
from report import present, table

from horovod_spark_runner import run_training

BATCH = 64
EVERY = 50


def note_steps(folder: str) -> Any:
    """Return callbacks that write the time of every step of rank 0, by epoch."""

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        class Notes(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                self.times: list[list[float]] = []

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.times.append([])

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.times[-1].append(time.perf_counter())

            def on_train_end(self, logs: Any = None) -> None:
                if hvd.rank() == 0:
                    Path(folder, "times").write_text(json.dumps(self.times))

        return [Notes()]

    return callbacks


def pairs_of(times: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the seconds of the 50 steps after each checkpoint and of the 50 after those. Pure."""
    pairs, before = [], 0
    for epoch in times:
        for step in range(-before % (2 * EVERY), len(epoch) - 2 * EVERY, 2 * EVERY):
            if step:  # the time of the step at whose end the checkpoint is taken
                first, middle, last = (epoch[step - 1 + n * EVERY] for n in range(3))
                pairs.append((middle - first, last - middle))
        before += len(epoch)
    return pairs


def crash_at(step: int, folder: str) -> Any:
    """Return callbacks that note the time of every rank-0 step around a kill of rank 1."""

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        class Crash(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                crashed = Path(folder, "crashed")
                done = int(self.model.optimizer.iterations)
                if hvd.rank() == 1 and done == step and not crashed.exists():
                    crashed.write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                resumed = Path(folder, "resumed")
                if hvd.rank() == 0 and crashed.exists() and done < step and not resumed.exists():
                    resumed.write_text(str(time.time()))

        return [Crash()]

    return callbacks


class Bench:
    """Trains again and again on the same rows."""

    def __init__(self) -> None:
        self.frame = make_frame(*make_arrays())
        self._place = tempfile.TemporaryDirectory()
        self._runs = 0

    def train(self, width: int, epochs: int, **options: Any) -> Any:
        self._runs += 1
        return run_training(
            self.frame,
            functools.partial(make_cnn, width),
            feature_cols=["image"],
            label_cols=["label"],
            shapes={"image": (SIDE, SIDE, 1)},
            num_workers=2,
            batch_size=BATCH,
            epochs=epochs,
            run_dir=str(Path(self._place.name, str(self._runs))),
            verbose=False,
            **options,
        )

    def slowdown(self, width: int, epochs: int, runs: int) -> list[Any]:
        """Return a row of the table: weights, step, pairs, median and quartiles of the ratio."""
        pairs = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                self.train(
                    width, epochs, checkpoint_every_steps=2 * EVERY, callbacks=note_steps(folder)
                )
                pairs += pairs_of(json.loads(Path(folder, "times").read_text()))
        ratios = [after / later for after, later in pairs]
        low, median, high = statistics.quantiles(ratios, n=4)
        step = statistics.median(later for _, later in pairs) / EVERY
        return [
            f"{make_cnn(width).count_params():,}",
            f"{1000 * step:.1f} ms",
            len(pairs),
            f"{median:.3f}",
            f"{low:.3f} to {high:.3f}",
        ]

    def recovery(self) -> float:
        """Return the seconds from a rank's death to the first step of the restarted run."""
        with tempfile.TemporaryDirectory() as folder:
            self.train(
                1,
                3,
                checkpoint_every_steps=EVERY,
                max_restarts=1,
                restart_backoff=0.0,
                callbacks=crash_at(2 * EVERY + 10, folder),
            )
            crashed, resumed = (
                float(Path(folder, name).read_text()) for name in ("crashed", "resumed")
            )
        return resumed - crashed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=4, help="runs of each network (4)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    bench = Bench()
    bench.train(1, 1)  # the first run of a session is slower
    rows = []
    for width, epochs in ((1, 8), (4, 4)):
        rows.append(bench.slowdown(width, epochs, arguments.runs))
        print(rows[-1], flush=True)
    seconds = bench.recovery()
    bench.frame.sparkSession.stop()
    head = ["weights", "step", "pairs", "median ratio", "quartiles"]
    text = (
        f"Two ranks on this machine, as many as it has cores, batches of {BATCH} per rank: the "
        f"{EVERY} steps after a checkpoint, its stop and its writing included, compared with the "
        f"{EVERY} after those; the network of the training benchmark and one four times as wide."
        f"\n\n{table(head, rows)}\n\nFrom the death of a rank to the first step of the restarted "
        f"run: {seconds:.1f} s."
    )
    present("Checkpoints", "python benchmarks/checkpoint.py --write", text, arguments.write)


if __name__ == "__main__":
    main()
