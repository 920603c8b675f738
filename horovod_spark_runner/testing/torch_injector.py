"""The callback of PyTorch trainings that lets faults happen; made on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpi4py import MPI

from ..engines.torch.torch_callback import TorchCallback
from .faults import Faults


class TorchFaultInjector(TorchCallback):
    """Counts the steps of the whole run, which is kept in checkpoints."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.steps = 0

    def on_step_end(self, step: int, logs: Mapping[str, object]) -> None:
        self.steps += 1
        self.faults.after_step(self.steps, MPI.COMM_WORLD.Get_rank())

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
