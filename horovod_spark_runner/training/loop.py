"""The training of one rank, from the spec to the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

from ..data.manifest import Manifest
from ..data.reader import Batch, DatasetReader
from ..data.sharding import EpochPlan, plan_epoch
from ..launch.reporting import send
from ..storage.checkpoint import CheckpointInfo, load_checkpoint, save_checkpoint
from ..storage.filesystem import Location
from ..storage.run_directory import RunDirectory
from .artifact import save_model
from .callbacks import make_callbacks
from .exchange import GradientExchange, broadcast
from .learning_rate import LearningRate
from .metrics import MetricsGuard, plain, reduce_metrics
from .model import InputBinding, bind_outputs, build_model, check_trainable, find_optimizers
from .spec import TrainingReport, TrainingSpec
from .state import TrainingVariables

PROGRESS_SECONDS = 0.2


def train(spec: TrainingSpec) -> TrainingReport:
    """Train on this rank, together with all others.

    Raises:
        ModelError: the model cannot be trained on these columns.
        RunDirectoryError: the checkpoint to go on from is another model's.
    """
    hvd.init()
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)
    keras.utils.set_random_seed(spec.fit.seed)
    training = Training(spec, MPI.COMM_WORLD)
    training.prepare()
    try:
        return training.run()
    finally:
        training.close()


class Training:
    """The state of one rank's training.

    Args:
        spec: what to train.
        world: communicator of all ranks, for what is agreed on outside the step.
    """

    def __init__(self, spec: TrainingSpec, world: MPI.Comm) -> None:
        self._spec = spec
        self._world = world
        self._rank, self._size = world.Get_rank(), world.Get_size()
        self._directory = RunDirectory(Location(spec.run_dir))
        self._model = build_model(spec.model)
        check_trainable(self._model)
        self._inputs = InputBinding(self._model, spec.inputs, spec.train)
        self._labels = bind_outputs(self._model, spec.outputs)
        columns = [*spec.inputs.columns, *spec.outputs.columns]
        if spec.weight is not None:
            columns.append(spec.weight)
        self._reader = DatasetReader(spec.train, columns, spec.transforms)
        self._validation = (
            None
            if spec.validation is None
            else DatasetReader(spec.validation, columns, spec.transforms)
        )
        self._by_weight = _averages_by_weight(self._model)
        self._exchange = GradientExchange(self._model, spec.allreduce, spec.fit.batch_size)
        self._history: list[dict[str, float]] = []
        self._epoch = self._step = 0
        self._last: Batch | None = None
        self._train_seconds = 0.0
        self._rows_seen = 0
        self._reported = 0.0

    # -- before the first step -----------------------------------------------------------------

    def prepare(self) -> None:
        """Bring all ranks to the same state: built, restored or broadcast."""
        self._build()
        self._variables = TrainingVariables(self._model)
        state: dict[str, Any] = {}
        if self._spec.checkpoint is not None:
            state = self._restore(Location(self._spec.checkpoint))
        broadcast(self._variables.shared)
        self._variables.separate_seeds(self._rank)
        self._rate = LearningRate(
            self._model.optimizer, self._spec.fit, self._size, state.get("learning_rate")
        )
        self._callbacks = make_callbacks(
            self._spec.callbacks, self._model, self._rank, self._spec.fit.epochs
        )
        self._exchange.attach()
        self._train_step = self._compile(self._exchange.step)
        self._test_step = self._compile(self._model.test_step)
        # Before the first collective of the training: all ranks have come this far, or none goes.
        self._world.Barrier()

    def close(self) -> None:
        self._exchange.detach()
        self._reader.close()
        if self._validation is not None:
            self._validation.close()

    def _build(self) -> None:
        if not self._model.built:
            self._model(self._inputs(_zero_rows(self._spec.train, self._spec.inputs.columns)))
        for optimizer in find_optimizers(self._model):
            if not optimizer.built and optimizer is self._model.optimizer:
                optimizer.build(self._model.trainable_variables)

    def _restore(self, folder: Location) -> dict[str, Any]:
        info, arrays = load_checkpoint(folder)
        self._variables.check_same(info.variables, str(folder))
        self._variables.restore(arrays)
        self._history, self._epoch, self._step = info.history, info.epoch, info.step
        return info.state

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        compiled: Callable[..., Any] = tf.function(function, reduce_retracing=True)
        return compiled

    # -- the epochs ----------------------------------------------------------------------------

    def run(self) -> TrainingReport:
        """Train the epochs that are left and save the model."""
        self._model.stop_training = False
        self._callbacks.on_train_begin()
        while self._epoch < self._spec.fit.epochs and not self._model.stop_training:
            self._run_epoch()
        self._callbacks.on_train_end()
        if self._rank == 0:
            example = self._inputs(_zero_rows(self._spec.train, self._spec.inputs.columns))
            save_model(self._directory, self._model, self._spec, example)
        rows = self._world.allreduce(self._rows_seen)
        return TrainingReport(
            history=self._history,
            samples_per_second=rows / self._train_seconds if self._train_seconds else 0.0,
            train_seconds=self._train_seconds,
        )

    def _run_epoch(self) -> None:
        plan = self._plan()
        self._callbacks.set_params(
            {"epochs": self._spec.fit.epochs, "steps": plan.steps, "verbose": 0}
        )
        self._model.reset_metrics()
        self._callbacks.on_epoch_begin(self._epoch)
        began, seen = time.monotonic(), self._rows_seen
        for batch in self._reader.epoch(plan, self._rank, self._size):
            if self._run_step(plan, batch):
                break
        seconds = time.monotonic() - began
        self._train_seconds += seconds
        logs = reduce_metrics(self._model)
        if self._validation is not None:
            logs.update(self._evaluate())
        self._callbacks.on_epoch_end(self._epoch, logs)
        self._agree_to_stop()
        self._history.append(logs)
        self._epoch += 1
        rate = self._world.allreduce(self._rows_seen - seen) / max(seconds, 1e-9)
        self._report(plan, plan.steps, logs, samples_per_second=rate)
        if self._rank == 0:
            self._save_checkpoint()

    def _plan(self) -> EpochPlan:
        fit = self._spec.fit
        return plan_epoch(
            [(group.rows, group.size) for group in self._spec.train.row_groups],
            global_batch=fit.batch_size * self._size,
            seed=fit.seed,
            epoch=self._epoch,
            window_bytes=fit.window_bytes,
            shuffle=fit.shuffle,
        )

    def _run_step(self, plan: EpochPlan, batch: Batch) -> bool:
        """Run one step; return whether the ranks have agreed to stop."""
        self._rate.before_step(self._epoch + batch.step / plan.steps)
        self._callbacks.on_train_batch_begin(batch.step)
        stop = tf.constant(1.0 if self._model.stop_training else 0.0)
        guard = None
        if batch.rows:
            self._last = batch
            weight = self._weight_of(batch)
        else:
            # Fewer rows than ranks: take part in the exchange with a row that counts for nothing.
            assert self._last is not None
            guard, weight = MetricsGuard(self._model), 0.0
            batch = Batch(batch.step, 1, {n: v[:1] for n, v in self._last.arrays.items()})
        logs, stopping = self._train_step(self._data(batch), tf.constant(weight), stop)
        if guard is not None:
            guard.restore()
        else:
            self._rows_seen += batch.rows
        self._step += 1
        logs = plain(logs)
        self._callbacks.on_train_batch_end(batch.step, logs)
        self._report(plan, batch.step + 1, logs)
        if float(stopping):
            self._model.stop_training = True
            return True
        return False

    def _weight_of(self, batch: Batch) -> float:
        if self._by_weight and self._spec.weight is not None:
            return float(np.sum(batch.arrays[self._spec.weight], dtype=np.float64))
        return float(batch.rows)

    def _data(self, batch: Batch) -> tuple[Any, ...]:
        values: tuple[Any, ...] = (self._inputs(batch.arrays), self._labels(batch.arrays))
        if self._spec.weight is not None:
            values = (*values, batch.arrays[self._spec.weight])
        data: tuple[Any, ...] = tf.nest.map_structure(tf.convert_to_tensor, values)
        return data

    def _evaluate(self) -> dict[str, float]:
        assert self._validation is not None
        self._model.reset_metrics()
        self._callbacks.on_test_begin()
        share = self._validation.share(self._rank, self._size, self._spec.fit.batch_size)
        for batch in share:
            self._callbacks.on_test_batch_begin(batch.step)
            logs = self._test_step(self._data(batch))
            self._callbacks.on_test_batch_end(batch.step, plain(logs))
        logs = reduce_metrics(self._model)
        self._callbacks.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def _agree_to_stop(self) -> None:
        # A callback that counts its own time or batches may stop one rank and not another.
        self._model.stop_training = self._world.allreduce(
            bool(self._model.stop_training), op=MPI.LOR
        )

    # -- telling and keeping -------------------------------------------------------------------

    def _report(self, plan: EpochPlan, step: int, logs: dict[str, float], **more: Any) -> None:
        now = time.monotonic()
        last = bool(more)
        if self._rank or (not last and (now - self._reported < PROGRESS_SECONDS)):
            return
        if not last and step == plan.steps:  # the epoch's own report follows
            return
        self._reported = now
        epoch = self._epoch - 1 if last else self._epoch
        send(
            {
                "type": "progress",
                "epoch": epoch,
                "epochs": self._spec.fit.epochs,
                "step": step,
                "steps": plan.steps,
                "metrics": logs,
                **more,
            }
        )

    def _save_checkpoint(self) -> None:
        info = CheckpointInfo(
            step=self._step,
            epoch=self._epoch,
            history=self._history,
            data_fingerprint=self._spec.train.fingerprint,
            variables=self._variables.describe(),
            settings=self._spec.settings,
            state={"learning_rate": self._rate.state},
        )
        save_checkpoint(
            self._directory, info, self._variables.capture(), self._spec.keep_checkpoints
        )
        self._directory.write_metrics(self._history)


def _averages_by_weight(model: Any) -> bool:
    """Tell whether the model's loss divides by the sum of sample weights instead of by rows.

    Raises:
        ModelError: the loss is a sum, which depends on how rows are spread over ranks.
    """
    from ..errors import ModelError

    losses = [
        loss for loss in keras.tree.flatten(model.loss) if isinstance(loss, keras.losses.Loss)
    ]
    reductions = {loss.reduction for loss in losses}
    if "sum" in reductions or "none" in reductions or None in reductions:
        raise ModelError(
            f"the model's loss has reduction={sorted(map(str, reductions))}; use "
            "'sum_over_batch_size' (the default), so that the loss of a global batch is the mean "
            "over its rows"
        )
    return "mean_with_sample_weight" in reductions


def _zero_rows(manifest: Manifest, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return one row of zeros for each of the named columns."""
    columns = [manifest.column(name) for name in names]
    return {column.name: np.zeros((1, *column.shape), column.dtype) for column in columns}
