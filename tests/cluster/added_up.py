"""What ranks add to memory of all ranks, many times over, against what they know to be the sums."""

from __future__ import annotations

from typing import Any

PIECE, LENGTH = 64, 640


def accumulates(each: int) -> dict[str, Any]:
    """Add whole numbers ``each`` times, in pieces, and count up numbers that all ranks count.

    Returns:
        How many sums are wrong of numbers of each type, how often all ranks have added, and whether
        what was counted up was a number of its own every time.
    """
    import numpy as np
    from mpi4py import MPI

    from horovod_spark_runner.sync import distributed_memory as served
    from horovod_spark_runner.sync.mpi import MpiRanks

    world = MPI.COMM_WORLD
    ranks = MpiRanks()
    wrong: dict[str, int] = {}
    whole = served._PIECE
    served._PIECE = PIECE
    random = np.random.default_rng(ranks.rank)
    for dtype in ("int32", "float32"):
        memory = ranks.memory(np.full(LENGTH, 7, dtype), range(ranks.size))
        total = np.zeros(LENGTH, np.int64)
        for number in range(each * PIECE // LENGTH // 2):
            given = random.integers(-9, 9, LENGTH)
            memory.add(given.astype(dtype))
            total += given
            if number % 100 == 0:
                memory.get()
        ranks.barrier()  # before what keeps Python's lock while it waits: a rank has to answer
        total = world.allreduce(total) + 7
        ranks.barrier()
        wrong[dtype] = int((memory.get() != total).sum())
        memory.close()
    served._PIECE = whole
    memory = ranks.memory(np.zeros(9, np.int64), [0])
    seen = [memory.add_at(3, 1) for _ in range(each // 20)]
    memory.close()
    every = sorted(number for own in world.allgather(seen) for number in own)
    return {
        "wrong": wrong,
        "accumulates": world.allreduce(each),
        "counted": every == list(range(len(every))),
    }
