"""What it costs a step to tell where its time goes.

Two ranks train a small dense network: of all that is trained by several ranks, the quickest steps.
In the same processes are measured, in turns and each as the quickest of many, a compiled function
with and without what it tells of its exchange (the stopwatch, and the bytes that are counted), and
the changes of the clock that the loop makes in a step. What they take is compared with the quickest
of many steps that exchange, without the loop, its callbacks and Keras around them. Run it with
``python benchmarks/accounting.py``; ``--write`` puts the result into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from peers.session import make_session
from report import GOAL_HEAD, goal, present, shown_command, table

from horovod_spark_runner import HorovodRunner

RANKS = 2
BATCH, WIDTH = 32, 64
# Turns as short as this find moments in which nothing else runs.
TURNS, CALLS = 2000, 5


def seconds_of(act: Callable[[], Any]) -> float:
    """Return the seconds of one call, the mean of the calls of a turn."""
    began = time.perf_counter()
    for _ in range(CALLS):
        act()
    return (time.perf_counter() - began) / CALLS


def measure() -> dict[str, float]:
    """Return the seconds of a step, of what it tells and of the clock on this rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_spark_runner.engines.keras.exchange import Stopwatch, TensorCollectives
    from horovod_spark_runner.training.time_breakdown import Clock, Kind

    hvd.init()
    watch, collectives, clock = Stopwatch(), TensorCollectives(), Clock()
    # As the loop changes it in a step.
    changes = (Kind.CALLBACKS, Kind.EXCHANGE, Kind.STEP, Kind.CALLBACKS, Kind.DATA)
    weights = [tf.Variable(tf.zeros((64, WIDTH))), tf.Variable(tf.zeros((WIDTH, 10)))]
    rows = tf.random.normal((BATCH, 64))

    def compiled(watched: bool, exchanged: bool) -> Callable[[], Any]:
        @tf.function
        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.relu(rows @ weights[0]) @ weights[1])
            gradients = tape.gradient(loss, weights)
            begun = watch.begin(gradients) if watched else None
            if watched:
                size = collectives.nbytes(gradients)
                collectives.count(size, size)
            if exchanged:
                gradients = hvd.grouped_allreduce(gradients, name="gradients")
            watch.end(begun, gradients)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.01 * gradient)
            return loss

        step()
        return step

    def clocked() -> None:
        for kind in changes:
            clock.to(kind)

    # A step of this rank alone shows what telling adds; an exchange would hide it.
    bare, watched = compiled(False, False), compiled(True, False)
    whole = compiled(True, True)
    parts = (bare, watched, clocked)
    turns = [[seconds_of(part) for part in parts] for _ in range(TURNS)]
    least_bare, least_watched, least_clock = (min(each) for each in zip(*turns, strict=True))
    step = min(seconds_of(whole) for _ in range(TURNS))
    return {"step": step, "exchange told": least_watched - least_bare, "clock": least_clock}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    spark = make_session(RANKS)
    try:
        ranks = HorovodRunner(num_workers=RANKS, stream_logs=False).run(measure).results
    finally:
        spark.stop()
    names = ("step", "exchange told", "clock")
    rows = [
        [f"rank {rank}", *(f"{1e6 * found[name]:,.1f} µs" for name in names)]
        for rank, found in enumerate(ranks)
    ]
    part = max((found["exchange told"] + found["clock"]) / found["step"] for found in ranks)
    goals = [goal("accounting, in percent of a step", 100 * part, at_most=0.5)]
    text = (
        f"A dense network of 64, {WIDTH} and 10 units, {BATCH} rows per rank and step.\n\n"
        f"{table(['', *names], rows)}\n\n{table(GOAL_HEAD, goals)}"
    )
    present("Accounting", shown_command(), text, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
