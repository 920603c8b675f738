"""Check that MPI supports threads beside Horovod's own."""

from __future__ import annotations

from mpi4py import MPI

from ..errors import EnvironmentProblem


def need_threads(what: str, others: str) -> None:
    """Check that several threads of this rank may be in MPI at once.

    Args:
        what: says what is done beside Horovod's own thread.
        others: ways of synchronising that do not need it.

    Raises:
        EnvironmentProblem: they may not.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise EnvironmentProblem(
            f"{what} beside Horovod's own thread, but this rank's MPI allows one thread at a time "
            "(its thread level is not MPI_THREAD_MULTIPLE); leave MPI4PY_RC_THREAD_LEVEL and "
            "HOROVOD_MPI_THREADS_DISABLE unset, take an Open MPI that was built with threads, or "
            f"use {others}"
        )
