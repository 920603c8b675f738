"""What checkpoints cost a training, and how soon a killed one takes its next step.

Two ranks train the same model on the same rows, in turns without checkpoints within the epoch and
with one every 50 steps; the time in the training steps, the stops for checkpoints included, is
compared. Then rank 1 is killed in the middle, and the time until the first step of the restarted
run is taken. Run it with ``python benchmarks/checkpoint.py``; ``--write`` puts the result into
``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from model import SIDE, make_arrays, make_cnn, make_frame
from report import present, table

from horovod_spark_runner import run_training

BATCH = 64
EVERY = 50


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

    def __init__(self, epochs: int) -> None:
        self.frame = make_frame(*make_arrays())
        self._epochs = epochs
        self._place = tempfile.TemporaryDirectory()
        self._runs = 0

    def train(self, **options: Any) -> Any:
        self._runs += 1
        return run_training(
            self.frame,
            make_cnn,
            feature_cols=["image"],
            label_cols=["label"],
            shapes={"image": (SIDE, SIDE, 1)},
            num_workers=2,
            batch_size=BATCH,
            epochs=self._epochs,
            run_dir=str(Path(self._place.name, str(self._runs))),
            verbose=False,
            **options,
        )

    def slowdown(self, rounds: int) -> tuple[str, float]:
        """Return the table of both kinds of run and the median ratio of a round."""
        rows, ratios = [], []
        self.train()  # the first run of a session is slower
        for number in range(1, rounds + 1):
            seconds = {}
            # In turns, so that neither kind is always the first.
            for steps in (None, EVERY) if number % 2 else (EVERY, None):
                run = self.train(checkpoint_every_steps=steps)
                seconds[steps] = run.timings["train"]
            without, every = seconds[None], seconds[EVERY]
            ratios.append(every / without)
            rows.append([number, f"{without:.2f} s", f"{every:.2f} s", f"{ratios[-1]:.3f}"])
            print(rows[-1], flush=True)
        head = ["round", "without", f"every {EVERY} steps", "ratio"]
        return table(head, rows), statistics.median(ratios)

    def recovery(self) -> float:
        """Return the seconds from a rank's death to the first step of the restarted run."""
        with tempfile.TemporaryDirectory() as folder:
            self.train(
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
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs (5)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of a run (3)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    bench = Bench(arguments.epochs)
    rounds, ratio = bench.slowdown(arguments.rounds)
    seconds = bench.recovery()
    bench.frame.sparkSession.stop()
    text = (
        f"Two ranks on this machine, the network of the training benchmark, {arguments.epochs} "
        f"epochs of 280 steps of {BATCH} rows per rank: time in the training steps, stops for "
        f"checkpoints included, in turns.\n\n{rounds}\n\nThe median ratio is {ratio:.3f}. From "
        f"the death of a rank to the first step of the restarted run: {seconds:.1f} s."
    )
    present("Checkpoints", "python benchmarks/checkpoint.py --write", text, arguments.write)


if __name__ == "__main__":
    main()
