"""The synchronisation class for each `sync` setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config.sync import Allreduce, AsyncServer, DiLoCo, LocalSGD
from ..sync.allreduce import AllreduceSynchroniser
from ..sync.asynchronous import AsyncSynchroniser
from ..sync.compressed import CompressedSynchroniser
from ..sync.local_sgd import LocalSGDSynchroniser
from ..sync.mpi import MpiRanks, MpiWire
from ..sync.synchroniser import Collectives, Synchroniser

# Makes a way of synchronising from its settings and the framework's collectives.
SynchroniserFactory = Callable[[Any, Collectives], Synchroniser]


def allreduce(options: Allreduce, collectives: Collectives) -> Synchroniser:
    """Return the synchroniser that adds up gradients in every step, compressed or not."""
    compression = options.compression
    if compression == "none" or compression == "fp16":  # which the framework's sums can do
        return AllreduceSynchroniser(compression, collectives)
    return CompressedSynchroniser(compression, collectives, MpiWire())


def _asynchronous(options: AsyncServer, collectives: Collectives) -> Synchroniser:
    """Return the synchroniser of asynchronous ranks."""
    return AsyncSynchroniser(options, collectives, MpiRanks())


# By the class of the settings.
SYNCHRONISERS: dict[type, SynchroniserFactory] = {
    Allreduce: allreduce,
    LocalSGD: LocalSGDSynchroniser,
    DiLoCo: LocalSGDSynchroniser,
    AsyncServer: _asynchronous,
}
