"""Adds up between hosts as it is told, one run of ranks after the other.

A line of JSON on standard input asks: ``ranks``, how many, ``parameters``, what Open MPI is told
besides, and ``sizes``, bytes. A line of JSON on standard output answers with the seconds of a sum
of each size. The arguments are the master and this host's address.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.session import join

from horovod_spark_runner import HorovodRunner, MpiOptions

# Sums of each size take about so long, of which there are so many at least.
SECONDS, LEAST = 0.5, 3


def seconds_of_sums(sizes: list[int]) -> list[float]:
    """Return the seconds that ``MPI_Allreduce`` of so many bytes takes; runs on every rank."""
    import time

    import numpy as np
    from mpi4py import MPI

    world, found = MPI.COMM_WORLD, []
    for size in sizes:
        numbers = np.ones(size // 4, np.float32)
        total = np.empty_like(numbers)

        def seconds_of(
            count: int, numbers: np.ndarray = numbers, total: np.ndarray = total
        ) -> float:
            world.Barrier()
            began = time.perf_counter()
            for _ in range(count):
                world.Allreduce(numbers, total)
            return (time.perf_counter() - began) / count

        seconds_of(1)
        count = world.bcast(max(LEAST, int(SECONDS / seconds_of(1))))
        found.append(seconds_of(count))
        if not (total == world.Get_size()).all():
            raise AssertionError("the sums are wrong")
    return found


def main() -> None:
    join(*sys.argv[1:])
    for line in sys.stdin:
        asked = json.loads(line)
        options = MpiOptions(parameters=asked["parameters"])
        runner = HorovodRunner(asked["ranks"], mpi=options, stream_logs=False)
        print(json.dumps(runner.run(seconds_of_sums, asked["sizes"]).results[0]), flush=True)


if __name__ == "__main__":
    main()
