"""One process of a world: trains case after case and leaves a recording of each.

``python -m tests.conformance.world FOLDER PART CASE…`` with PART ``one`` or ``two``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

PARTS = {"one": 1, "two": 2}
_PR_SET_PDEATHSIG = 1


def keys_of(part: str) -> list[str]:
    """Return the names of the recordings that a part leaves of each case."""
    return ["fit", "one-0"] if part == "one" else [f"two-{rank}" for rank in range(PARTS[part])]


def main() -> None:
    """Train the named cases."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder, part, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]

    from mpi4py import MPI

    from .recording import save
    from .table import BY_NAME
    from .training import fit, forget, ours

    # What is imported stays: looking through it would be half the time of a case.
    gc.collect()
    gc.freeze()
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if size != PARTS[part]:
        raise SystemExit(f"part {part!r} is for {PARTS[part]} ranks, got {size}")

    for name in names:
        case, place = BY_NAME[name], folder / name
        if part == "one" and not case.refused:
            forget()
            save(fit(case, folder / "data", place / "files-fit"), place / "fit.npz")
        forget()
        files, run_dir = place / f"files-{part}-{rank}", place / f"run-{part}"
        recording = ours(case, folder / "data", files, run_dir, size, rank)
        save(recording, place / f"{part}-{rank}.npz")
        # No rank goes on to the next case before all are through with this one.
        world.Barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
