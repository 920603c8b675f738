"""A series of random faults by hand: ``python -m tests.faults.run --seed 1 --count 100``.

Every run of a training of 60 steps takes up to 20 faults; as many runs as the count needs.
Ends with an error if a run ends otherwise than an undisturbed one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from horovod_spark_runner.launch.restart import describe_attempts, steps_lost

from .injection import KINDS, choose_faults
from .training import STEPS, assert_same_end, make_frame, train

PER_RUN = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of steps, ranks and kinds (0)")
    parser.add_argument("--count", type=int, default=20, help="faults in all (20)")
    arguments = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = spark.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    frame = make_frame(session).cache()
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder, "undisturbed")
        train(frame, undisturbed)
        for number, begin in enumerate(range(0, arguments.count, PER_RUN)):
            count = min(PER_RUN, arguments.count - begin)
            faults = choose_faults(arguments.seed + number, count, STEPS, KINDS)
            notes = Path(folder, f"faults-{number}")
            notes.mkdir()
            run_dir = Path(folder, f"run-{number}")
            run = train(frame, run_dir, faults, str(notes))
            assert_same_end(run_dir, undisturbed)
            print(describe_attempts(run.attempts))
            print(f"{count} faults, {steps_lost(run.attempts)} steps trained again: the same end")
    session.stop()


if __name__ == "__main__":
    main()
