"""A rank of benchmarks/growth.py: joins a world and prints what that took, as a line of JSON.

Usage: growth_rank.py mpi|horovod. With ``mpi``: the CPU seconds of ``MPI_Init``, and the bytes that
its host has sent and received. With ``horovod``: these bytes for a sum of `TENSORS` numbers by
names that are new, per name, and for a later step with one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

TENSORS, STEPS = 500, 200


def cable_bytes() -> int:
    """Return the bytes that this host has sent and received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            words = line.split()
            return int(words[1]) + int(words[9])
    return 0


def join_mpi() -> dict[str, float]:
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    began = time.process_time()
    MPI.Init()
    took = time.process_time() - began
    MPI.COMM_WORLD.Barrier()
    return {"rank": MPI.COMM_WORLD.rank, "init_cpu": took, "traffic": cable_bytes()}


def join_horovod() -> dict[str, float]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    number = torch.ones(1)

    def add(prefix: str, count: int) -> int:
        """Add up numbers by so many names; return the bytes so far once all ranks have them."""
        names = [f"{prefix}.{i}" for i in range(count)]
        for handle in [hvd.allreduce_async(number, name=name, op=hvd.Sum) for name in names]:
            hvd.synchronize(handle)
        return cable_bytes()

    add("first", 4)
    hvd.barrier()
    before = cable_bytes()
    new = add("new", TENSORS) - before
    for _ in range(5):
        add("later", 1)
    hvd.barrier()
    before = cable_bytes()
    for _ in range(STEPS):
        after = add("later", 1)
    hvd.barrier()
    return {"rank": hvd.rank(), "new": new / TENSORS, "later": (after - before) / STEPS}


if __name__ == "__main__":
    print(json.dumps(join_mpi() if sys.argv[1] == "mpi" else join_horovod()), flush=True)
    time.sleep(1.0)  # mpirun is looked at meanwhile
