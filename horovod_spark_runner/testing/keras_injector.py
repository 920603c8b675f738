"""The Keras callback that lets faults happen; made on the ranks."""

from __future__ import annotations

import keras
from mpi4py import MPI

from .faults import Faults


class KerasFaultInjector(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps of the whole run: its attributes are kept in checkpoints."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.earlier = 0  # steps of whole epochs
        self.in_epoch = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.in_epoch = batch + 1
        self.faults.after_step(self.earlier + self.in_epoch, MPI.COMM_WORLD.Get_rank())

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.earlier += self.in_epoch
        self.in_epoch = 0
