"""Binding of a rank to its share of the host's cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..protocol.command import CPUS

_SYSTEM = Path("/sys/devices/system/cpu")
# Set where the user controls the placement of threads.
_DECIDED = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def bind_to_cores(environment: Mapping[str, str]) -> None:
    """Keep this process, all its threads, to its share of the host's cores, if it has one.

    Args:
        environment: variables, with those of mpirun that name the rank's number on this host.
    """
    if any(name in environment for name in _DECIDED):
        return
    try:
        rank = int(environment["OMPI_COMM_WORLD_LOCAL_RANK"])
        ranks = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
        allowed = side_by_side(os.sched_getaffinity(0))
        online = os.cpu_count() or len(allowed)
        cores = _share_of_cores(allowed, rank, ranks, int(environment[CPUS]), online)
        if cores:
            _set_affinity(cores)
    except (AttributeError, KeyError, OSError):
        pass  # not Linux, or not allowed here: only an optimization


def _share_of_cores(
    allowed: Sequence[int], rank: int, ranks: int, cpus: int, online: int
) -> list[int]:
    """Return the cores of one rank; none if cores would be left over or unevenly shared. Pure.

    Also none where ranks need more cores than are allowed and these are not all of the host's: then
    other ranks may run on other cores, and the number that share these is unknown.

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


def side_by_side(cores: Iterable[int], system: Path = _SYSTEM) -> list[int]:
    """Return ``cores`` in an order in which those of a socket, and threads of a core, are together.

    Their numbers do not show it: most systems number the first threads of all cores first.
    """

    def position(core: int) -> tuple[int, int, int]:
        topology = system / f"cpu{core}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            return package, int((topology / "core_id").read_text()), core
        except (OSError, ValueError):  # some virtual machines have no such files
            return 0, core, core

    return sorted(cores, key=position)


def _set_affinity(cores: Iterable[int]) -> None:
    """Keep this process, all its threads, to these cores.

    Raises:
        OSError: the system does not allow it.
    """
    # Threads to come inherit it; imports have started some already.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
