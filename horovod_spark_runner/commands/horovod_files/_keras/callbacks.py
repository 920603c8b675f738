"""Horovod's Keras callbacks for Keras 3, under the names that its public classes derive from."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.keras3 import tensorflow_variables

Logs = MutableMapping[str, Any]


class BroadcastGlobalVariablesCallbackImpl:
    """Broadcasts the variables of model and optimizer before the first step.

    Where a rank's model has no variables yet, ranks broadcast them after that step.
    """

    model: Any

    def __init__(self, backend: Any, root_rank: int, device: str = "", *args: Any) -> None:
        super().__init__(*args)
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._first = True
        self._local_vars: set[Any] = set()

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as this rank has it."""
        self._local_vars.add(tensorflow_variables(var).ref())

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._first:
            built = tf.constant(float(self.model.built))
            if float(hvd.allreduce(built, op=hvd.Min, name="broadcast_model_built")) == 1:
                self._broadcast()
        self._first = False

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        # Not model.variables: its metrics and random generators are each rank's.
        variables = [*self.model.weights]
        optimizer = self.model.optimizer
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            variables += optimizer.variables
        shared = [v for v in tensorflow_variables(variables) if v.ref() not in self._local_vars]
        with tf.device(self.device):
            hvd.broadcast_variables(shared, root_rank=self.root_rank)
        self.broadcast_done = True


class MetricAverageCallbackImpl:
    """Averages an epoch's logs over the ranks, for the callbacks after it."""

    def __init__(self, backend: Any, device: str = "", *args: Any) -> None:
        super().__init__(*args)
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = {} if logs is None else logs
        names = hvd.allgather_object(sorted(logs), name="metric_names")
        if any(others != names[0] for others in names):
            different = sorted(set().union(*names).difference(set(names[0]).intersection(*names)))
            raise ValueError(
                f"MetricAverageCallback: only some ranks log {', '.join(different)}; use the same "
                "metrics, validation_data and callbacks that log on all ranks"
            )
        for name in names[0]:
            value = tf.constant(logs[name], tf.float64)
            with tf.device(self.device):
                average = hvd.allreduce(value, name=f"metric_{name}").numpy()
            logs[name] = average if np.ndim(average) else float(average)


class LearningRateScheduleCallbackImpl:
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` within a range of epochs."""

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        backend: Any,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        *args: Any,
    ) -> None:
        super().__init__(*args)
        if initial_lr is None:
            raise ValueError("initial_lr is missing: give the optimizer's learning rate")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: the number of steps of an epoch is unknown; give "
                    "steps_per_epoch to the callback or to fit()"
                )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        last = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or last:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_learning_rate(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_learning_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set_learning_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        after = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        if self.momentum_correction and before != 0 and after != before:
            # Velocities hold the learning rate that they were added up with. Their factor, Keras'
            # momentum, is a constant of the compiled step.
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (after / before))


def _velocities(optimizer: Any) -> list[Any]:
    """Return the variables in which a Keras optimizer adds up updates, with the learning rate."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, keras.optimizers.SGD):
        return list(getattr(optimizer, "momentums", ()))
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return list(getattr(optimizer, "_momentums", ()))
    return []


class LearningRateWarmupCallbackImpl(LearningRateScheduleCallbackImpl):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``."""

    def __init__(
        self,
        backend: Any,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *args: Any,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The rate of an epoch's last step is that of the epoch's end.
            assert self.steps_per_epoch is not None
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return float((1 + done * (hvd.size() - 1)) / hvd.size())

        super().__init__(
            backend, initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction,
            steps_per_epoch, *args,
        )  # fmt: skip
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch == epoch + 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def checkpoint_file() -> str:
    """Refuse `BestModelCheckpoint`, which only Horovod's Spark estimator gives a file."""
    raise ValueError(
        "BestModelCheckpoint has no file: use, on rank 0, keras.callbacks.ModelCheckpoint("
        "'best.keras', save_best_only=True)"
    )
