"""Faults at chosen steps of a training, and callbacks that let them happen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..config.validators import check_choice, check_count, check_number
from ..errors import InvalidInputError
from ..frameworks import KERAS, TORCH
from ..storage.filesystem import WRITE_FAULTS
from ..training.engine import engine_named
from .one_rank import runs_here

FaultKind = Literal["kill", "stop", "terminate", "raise", "storage"]
# Faults that end or stop the process.
_OF_THE_PROCESS = ("kill", "stop")


@dataclass(frozen=True)
class Fault:
    """Something that happens to a rank, once.

    Attributes:
        step: the step of the whole run after which it happens, from 1.
        rank: the rank it happens to (0).
        kind: ``"kill"`` (default): SIGKILL, as of the kernel's out-of-memory killer; ``"stop"``: it
            hangs, which ``stall_timeout`` finds; ``"terminate"``: SIGTERM, on which all ranks save
            a checkpoint and leave; ``"raise"``: a RuntimeError, as of the user's own code;
            ``"storage"``: what rank 0 writes next (a checkpoint, event files) fails.
        seconds: for how long all writes fail, of ``"storage"`` only; 0 (default) for one write.

    Raises:
        InvalidInputError: a field cannot be right.
    """

    step: int
    rank: int = 0
    kind: FaultKind = "kill"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_count("step", self.step)
        check_count("rank", self.rank, 0)
        check_choice("kind", self.kind, get_args(FaultKind))
        check_number("seconds", self.seconds)
        if self.kind != "storage" and self.seconds:
            raise InvalidInputError(
                f"seconds={self.seconds:g} is for faults of kind 'storage', got kind={self.kind!r}"
            )
        if self.kind == "storage" and self.rank:
            raise InvalidInputError(
                f"rank={self.rank}, but a fault of kind 'storage' happens to rank 0, which writes "
                "for all"
            )

    def strike(self) -> None:
        """Make it happen to this process.

        Raises:
            RuntimeError: that is its kind.
            InvalidInputError: it would end or stop the test itself.
        """
        if self.kind in _OF_THE_PROCESS and runs_here():
            raise InvalidInputError(
                f"{self} would happen to the process of the test, which is the rank inside "
                "one_rank_here; let Spark start the ranks"
            )
        print(f"{self} happens", flush=True)
        if self.kind == "raise":
            raise RuntimeError(f"{self}")
        if self.kind == "storage":
            WRITE_FAULTS.begin(self.seconds)
            return
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
        os.kill(os.getpid(), signals[self.kind])


@dataclass(frozen=True)
class Faults:
    """Faults, each of which happens once, however often the run is started again.

    Attributes:
        faults: what happens.
        notes: folder that all ranks reach and that notes which have happened; made if missing.
    """

    faults: tuple[Fault, ...]
    notes: str

    def after_step(self, step: int, rank: int) -> None:
        """Let those happen to ``rank`` that are due after ``step`` steps of the whole run."""
        for fault in self.faults:
            if fault.rank == rank and fault.step <= step and self._first_time(fault):
                fault.strike()

    def _first_time(self, fault: Fault) -> bool:
        folder = Path(self.notes)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / f"{fault.kind}-{fault.rank}-{fault.step}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


Framework = Literal["keras", "torch"]


def with_faults(
    faults: Sequence[Fault],
    notes: str | os.PathLike[str],
    callbacks: Sequence[object] | Callable[[], Sequence[object]] = (),
    *,
    framework: Framework = "keras",
) -> Callable[[], list[object]]:
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

    def __call__(self) -> list[object]:
        if self.framework == "torch":
            from ..engines.torch.callbacks import check_callbacks
            from .torch_injector import TorchFaultInjector

            return [*check_callbacks(self.given), TorchFaultInjector(self.faults)]
        from ..engines.keras.callbacks import check_callbacks
        from .keras_injector import KerasFaultInjector

        return [*check_callbacks(self.given), KerasFaultInjector(self.faults)]
