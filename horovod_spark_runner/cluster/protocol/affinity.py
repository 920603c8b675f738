"""Cores of each rank.

Ranks that share all cores of a host wait for each other at every step: where the scheduler puts two
of them on one core for a while, all are slow. With a share of the cores to itself, each keeps its
pace (benchmarks/training.py). Where there are more ranks than cores, as on a local master with more
threads, those of a core yield it to each other (benchmarks/crowded.py). Where Spark has left cores
to others, ranks are not bound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")
CPUS = "HSR_CPUS"
# Set by whoever decides where threads run.
_DECIDED = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def share_of_cores(
    allowed: Sequence[int], rank: int, ranks: int, cpus: int, online: int
) -> list[int]:
    """Return the cores of one rank; none if ranks leave some, or cannot all have as many. Pure.

    Where ranks want more cores than are allowed, but not all of the host's are, others of them may
    run on other ones: it is not known how many share these.

    Args:
        allowed: the cores that processes of this host may run on, neighbours side by side.
        rank: number among the ranks of this host, from 0.
        ranks: ranks of this host.
        cpus: cores of each.
        online: cores of the host.
    """
    cores = len(allowed)
    if ranks * cpus < cores or (cores % ranks and ranks % cores):
        return []
    if ranks * cpus > cores != online:
        return []
    first = rank * cores // ranks
    return list(allowed[first : first + max(1, cores // ranks)])


def side_by_side(cores: Iterable[int], system: Path = SYSTEM) -> list[int]:
    """Return ``cores`` in an order in which those of a socket, and threads of a core, are together.

    Numbers do not tell: most systems number the first threads of all cores before the second ones.
    """

    def position(core: int) -> tuple[int, int, int]:
        topology = system / f"cpu{core}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            return package, int((topology / "core_id").read_text()), core
        except (OSError, ValueError):  # some virtual machines do not say
            return 0, core, core

    return sorted(cores, key=position)


def bind_to_cores(environment: Mapping[str, str]) -> None:
    """Keep this process, all its threads, to its share of the host's cores, if it has one.

    Args:
        environment: with mpirun's part, from which the number on this host is known.
    """
    if any(name in environment for name in _DECIDED):
        return
    try:
        rank = int(environment["OMPI_COMM_WORLD_LOCAL_RANK"])
        ranks = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
        allowed = side_by_side(os.sched_getaffinity(0))
        online = os.cpu_count() or len(allowed)
        cores = share_of_cores(allowed, rank, ranks, int(environment[CPUS]), online)
        if cores:
            keep_to(cores)
    except (AttributeError, KeyError, OSError):
        pass  # not Linux, or not allowed here: an advantage less


def keep_to(cores: Iterable[int]) -> None:
    """Keep this process, all its threads, to these cores.

    Raises:
        OSError: the system does not allow it.
    """
    # Threads to come inherit it; imports have started some already.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
