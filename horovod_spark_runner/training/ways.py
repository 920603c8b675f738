"""Which class makes the ranks train one model, by the settings that `run_training` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..settings.sync import Allreduce, DiLoCo, LocalSGD
from .sync.allreduce import AllreduceSynchroniser
from .sync.rounds import RoundsSynchroniser
from .sync.synchroniser import Collectives, Synchroniser

# Makes a way of synchronising from its settings and the framework's collectives.
Way = Callable[[Any, Collectives], Synchroniser]
# By the class of the settings.
SYNCHRONISERS: dict[type, Way] = {
    Allreduce: AllreduceSynchroniser,
    LocalSGD: RoundsSynchroniser,
    DiLoCo: RoundsSynchroniser,
}
