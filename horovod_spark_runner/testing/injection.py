"""Trainings with faults: what `run_training` takes as ``callbacks``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..config.validators import check_choice
from ..errors import InvalidInputError
from ..frameworks import KERAS, TORCH
from ..training.engine import engine_named
from .faults import Fault, Faults

Framework = Literal["keras", "torch"]


def with_faults(
    faults: Sequence[Fault],
    notes: str | os.PathLike[str],
    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] = (),
    *,
    framework: Framework = "keras",
) -> Callable[[], list[Any]]:
    """Return what `run_training` takes as ``callbacks`` to train with faults.

    Args:
        faults: what happens.
        notes: folder that all ranks reach, of this run alone; it notes which faults have happened,
            so that a run that is started again does not meet them again.
        callbacks: the training's own callbacks, as `run_training` takes them; they are called
            before a fault happens.
        framework: whose model is trained: ``"keras"`` (default) or ``"torch"``.

    Raises:
        InvalidInputError: ``faults`` holds something else, or ``callbacks`` are none of the
            framework's.
    """
    for fault in faults:
        if not isinstance(fault, Fault):
            raise InvalidInputError(f"faults must be of class Fault, got {fault!r}")
    check_choice("framework", framework, get_args(Framework))
    engine_named({"keras": KERAS, "torch": TORCH}[framework]).check_callbacks(callbacks)
    return _Callbacks(Faults(tuple(faults), os.fspath(notes)), callbacks, framework)


@dataclass(frozen=True)
class _Callbacks:
    """Makes the callbacks on each rank: those given, and the one that lets faults happen."""

    faults: Faults
    given: Any
    framework: Framework

    def __call__(self) -> list[Any]:
        if self.framework == "torch":
            from ..engines.torch.callbacks import check_callbacks
            from .torch_injector import TorchFaultInjector

            return [*check_callbacks(self.given), TorchFaultInjector(self.faults)]
        from ..engines.keras.callbacks import check_callbacks
        from .keras_injector import KerasFaultInjector

        return [*check_callbacks(self.given), KerasFaultInjector(self.faults)]
