"""Faults in a training of a PyTorch module: it ends as one that nothing has happened to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from horovod_spark_runner import CheckpointOptions, RestartOptions, TorchCallback
from horovod_spark_runner.checkpoint.retry_policy import FINISHED, PREEMPTED
from tests.torch.models import random_model
from tests.trainings import train

from .injection import Fault, first_time, strike
from .training import EPOCHS, EVERY, STEPS, assert_same_end, make_frame

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

# One of each kind that ends in another way.
FAULTS = (
    Fault(3, 0, "sigkill"),
    Fault(14, 1, "sigterm"),
    Fault(22, 0, "mpirun"),
    Fault(33, 1, "spark worker"),
    Fault(44, 0, "sigsegv"),
)


class Injector(TorchCallback):
    """Lets faults happen, by the step of the whole run."""

    def __init__(self, faults: tuple[Fault, ...], folder: Path) -> None:
        self.faults, self.folder = faults, str(folder)
        self.driver, self.step = os.getpid(), 0

    def on_train_begin(self, module: nn.Module) -> None:
        from mpi4py import MPI

        self.rank = MPI.COMM_WORLD.Get_rank()

    def on_step_end(self, step: int, logs: Mapping[str, Any]) -> None:
        self.step += 1
        for fault in self.faults:
            due = (fault.step, fault.rank) == (self.step, self.rank)
            if due and first_time(self.folder, fault):
                strike(fault.kind, self.driver, self.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@pytest.mark.timeout(1200)
def test_faults_in_a_training_of_a_module(spark: Any, tmp_path: Path) -> None:
    frame = make_frame(spark).cache()

    def run(name: str, *faults: Fault) -> Any:
        return train(
            frame,
            tmp_path / name,
            model_fn=random_model,
            batch_size=10,
            epochs=EPOCHS,
            callbacks=[Injector(faults, tmp_path)],
            checkpoints=CheckpointOptions(every_steps=EVERY),
            restarts=RestartOptions(max_restarts=len(faults), backoff_seconds=0.1),
        )

    run("undisturbed")
    attempts = run("run", *FAULTS).summary.attempts
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")
    assert len(list(tmp_path.glob("step-*"))) == len(FAULTS)
    ends = [attempt.ending for attempt in attempts]
    assert len(ends) == len(FAULTS) + 1
    assert (ends[1], ends[-1]) == (PREEMPTED, FINISHED)
    for fault, attempt in zip(FAULTS, attempts[1:], strict=True):
        # What was taken last may just be being written; the one before is never lost.
        assert fault.step // EVERY * EVERY - EVERY <= attempt.first_step <= fault.step + 1 < STEPS
