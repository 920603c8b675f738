"""The training of one rank, from the spec to the report."""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from mpi4py import MPI

from ..data.manifest import Manifest
from ..data.reader import Batch, DatasetReader
from ..data.sharding import EpochPlan, plan_epoch
from ..storage.checkpoint import CheckpointInfo
from ..storage.filesystem import Location
from ..storage.run_directory import RunDirectory
from .artifact import save_model
from .batches import BatchBinding
from .callback_state import CallbackStates
from .callbacks import make_callbacks
from .exchange import GradientExchange, broadcast
from .initial_weights import load_initial_weights
from .keeper import Keeper
from .learning_rate import LearningRate
from .metrics import MetricsGuard, plain, reduce_metrics
from .model import build_model, check_trainable, find_optimizers
from .preemption import PreemptionWatch
from .progress import Progress, ProgressReporter
from .random_state import make_generators
from .rank_state import RankState, restore_rank
from .spec import TrainingReport, TrainingSpec
from .state import TrainingVariables
from .step import PREEMPT, SAVE, STOP, TrainStep


def train(spec: TrainingSpec) -> TrainingReport:
    """Train on this rank, together with all others.

    Raises:
        ModelError: the model cannot be trained on these columns.
        RunDirectoryError: the checkpoint to go on from is another model's.
        CheckpointError: a checkpoint could not be written.
    """
    hvd.init()
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)
    keras.utils.set_random_seed(spec.fit.seed)
    with PreemptionWatch() as watch:
        training = Training(spec, MPI.COMM_WORLD, watch)
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
        watch: notes the request to end soon.
    """

    def __init__(self, spec: TrainingSpec, world: MPI.Comm, watch: PreemptionWatch) -> None:
        self._spec = spec
        self._world = world
        self._watch = watch
        self._rank, self._size = world.Get_rank(), world.Get_size()
        self._model = build_model(spec.model)
        check_trainable(self._model)
        self._batches = BatchBinding(self._model, spec)
        self._reader = self._read(spec.train)
        self._validation = None if spec.validation is None else self._read(spec.validation)
        self._exchange = GradientExchange(self._model, spec.allreduce)
        self._progress = Progress()
        self._reporter = ProgressReporter(self._rank, spec.fit.epochs)
        self._preempted = False

    def _read(self, data: Manifest) -> DatasetReader:
        # The window may take as much, so a dataset that fits into it can just as well be kept.
        keep = self._spec.fit.window_bytes
        return DatasetReader(data, self._batches.columns, self._spec.transforms, keep)

    # -- before the first step -----------------------------------------------------------------

    def prepare(self) -> None:
        """Bring all ranks to the same state: built, restored or broadcast."""
        self._build()
        make_generators()
        self._variables = TrainingVariables(self._model)
        self._keeper = Keeper(self._spec, self._world, self._model, self._variables)
        self._restored = self._keeper.load()
        state: dict[str, Any] = {}
        if self._restored is not None:
            info = self._restored[0]
            state = info.state
            self._progress = Progress(
                info.step, info.epoch, info.epoch_step, info.history, state.get("stopped_at")
            )
        elif self._spec.warm_start is not None and self._rank == 0:
            load_initial_weights(self._model, self._spec.warm_start)
        broadcast(self._variables.shared)
        self._variables.separate_seeds(self._rank)
        self._rate = LearningRate(
            self._model.optimizer, self._spec.fit, self._spec.workers, state.get("learning_rate")
        )
        self._callbacks, named = make_callbacks(
            self._spec.callbacks,
            self._model,
            self._rank,
            self._spec.fit.epochs,
            resumed=self._restored is not None,
        )
        self._named_callbacks = named
        self._exchange.attach()
        eager = self._model.run_eagerly
        self._train_step = TrainStep(self._exchange, self._spec.fit.batch_size, eager=eager)
        test_step = self._model.test_step
        self._test_step = test_step if eager else tf.function(test_step, reduce_retracing=True)
        # Before the first collective of the training: all ranks have come this far, or none goes.
        self._world.Barrier()

    def close(self) -> None:
        self._exchange.detach()
        self._keeper.close()
        self._reader.close()
        if self._validation is not None:
            self._validation.close()

    def _build(self) -> None:
        if not self._model.built:
            self._model(self._batches.example)
        for optimizer in find_optimizers(self._model):
            if not optimizer.built and optimizer is self._model.optimizer:
                optimizer.build(self._model.trainable_variables)

    # -- the epochs ----------------------------------------------------------------------------

    def run(self) -> TrainingReport:
        """Train the epochs that are left and save the model."""
        self._model.stop_training = False
        self._callbacks.on_train_begin()
        self._states = CallbackStates(self._named_callbacks)
        resumed_in_epoch = self._progress.epoch_step > 0
        if self._restored is not None:
            self._resume(*self._restored)
            self._restored = None
        while not self._finished:
            self._run_epoch(begun=resumed_in_epoch)
            resumed_in_epoch = False
            if self._preempted:
                self._keeper.finish()
                return self._report()
        self._callbacks.on_train_end()
        self._keeper.finish()
        if self._rank == 0:
            directory = RunDirectory(Location(self._spec.run_dir))
            save_model(directory, self._model, self._spec, self._batches.example)
        return self._report()

    @property
    def _finished(self) -> bool:
        epochs = self._spec.fit.epochs
        # A run that a callback ended early is over, until more epochs are asked for.
        return self._progress.epoch >= epochs or self._progress.stopped_at == epochs

    def _report(self) -> TrainingReport:
        rows = self._world.allreduce(self._progress.rows)
        seconds = self._progress.seconds
        return TrainingReport(
            history=self._progress.history,
            samples_per_second=rows / seconds if seconds else 0.0,
            train_seconds=seconds,
            preempted_at=self._progress.step if self._preempted else None,
        )

    def _resume(self, info: CheckpointInfo, own: RankState) -> None:
        """Bring callbacks, metrics and generators to where the checkpoint was taken."""
        if info.epoch_step:
            # The hooks set up what callbacks do not keep; what they change is put back.
            values = self._variables.capture()
            self._begin_epoch(self._plan())
            # Keras makes the compiled metrics at their first use.
            self._model.test_step(self._batches.data(self._batches.blank))
            self._model.reset_metrics()
            self._variables.restore(values)
        restore_rank(own, self._model, self._variables, self._states)

    def _begin_epoch(self, plan: EpochPlan) -> None:
        self._callbacks.set_params(
            {"epochs": self._spec.fit.epochs, "steps": plan.steps, "verbose": 0}
        )
        self._model.reset_metrics()
        self._callbacks.on_epoch_begin(self._progress.epoch)

    def _run_epoch(self, begun: bool) -> None:
        plan, progress = self._plan(), self._progress
        if not begun:
            self._begin_epoch(plan)
        time_before, rows_before = time.monotonic(), progress.rows
        for batch in self._reader.epoch(plan, self._rank, self._size, progress.epoch_step):
            if self._run_step(plan, batch):
                break
        seconds = time.monotonic() - time_before
        progress.seconds += seconds
        if self._preempted:
            return
        logs = reduce_metrics(self._model)
        if self._validation is not None:
            logs.update(self._evaluate())
        self._callbacks.on_epoch_end(progress.epoch, logs)
        self._agree()
        progress.history.append(logs)
        progress.epoch += 1
        progress.epoch_step = 0
        rate = self._world.allreduce(progress.rows - rows_before) / max(seconds, 1e-9)
        self._reporter.epoch(progress, plan.steps, rate)
        self._save()

    def _plan(self) -> EpochPlan:
        fit = self._spec.fit
        return plan_epoch(
            [(group.rows, group.size) for group in self._spec.train.row_groups],
            global_batch=self._spec.global_batch,
            seed=fit.seed,
            epoch=self._progress.epoch,
            window_bytes=fit.window_bytes,
            shuffle=fit.shuffle,
        )

    def _run_step(self, plan: EpochPlan, batch: Batch) -> bool:
        """Run one step; return whether the ranks have agreed to leave the epoch."""
        progress = self._progress
        self._keeper.poll()
        self._rate.before_step(progress.epoch + batch.step / plan.steps)
        self._callbacks.on_train_batch_begin(batch.step)
        logs, requests = self._exchange_step(plan, batch)
        progress.step += 1
        progress.epoch_step = batch.step + 1
        self._keeper.check_metric(logs)
        self._callbacks.on_train_batch_end(batch.step, logs)
        self._reporter.step(progress, plan.steps, logs)
        if requests[STOP]:
            self._model.stop_training = True
            return True
        self._preempted = bool(requests[PREEMPT])
        last = progress.epoch_step == plan.steps  # the epoch's own checkpoint follows
        due = requests[SAVE] or self._keeper.wants(progress.step)
        if self._preempted or (due and not last):
            self._save()
        return self._preempted

    def _exchange_step(self, plan: EpochPlan, batch: Batch) -> tuple[dict[str, float], Any]:
        asked = (self._model.stop_training, self._keeper.clock_is_due(), self._watch.requested)
        if batch.rows == 0:
            # Fewer rows than ranks: take part in the exchange with a row that counts for nothing.
            guard = MetricsGuard(self._model)
            data = self._batches.data(self._batches.blank)
            logs, counts = self._train_step.weighted(data, 0.0, asked)
            guard.restore()
            return plain(logs), counts.numpy()
        data = self._batches.data(batch.arrays)
        partial = plan.batch_rows(batch.step) < plan.global_batch
        if partial or self._batches.counts_by is not None:
            weight = self._batches.weight_of(batch)
            logs, counts = self._train_step.weighted(data, weight, asked)
        else:
            logs, counts = self._train_step.full(data, asked)
        self._progress.rows += batch.rows
        return plain(logs), counts.numpy()

    def _evaluate(self) -> dict[str, float]:
        assert self._validation is not None
        self._model.reset_metrics()
        self._callbacks.on_test_begin()
        share = self._validation.share(self._rank, self._size, self._spec.fit.batch_size)
        for batch in share:
            self._callbacks.on_test_batch_begin(batch.step)
            logs = self._test_step(self._batches.data(batch.arrays))
            self._callbacks.on_test_batch_end(batch.step, plain(logs))
        logs = reduce_metrics(self._model)
        self._callbacks.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def _agree(self) -> None:
        """Agree with all ranks whether to stop, and whether one was asked to end soon."""
        # A callback that counts its own time or batches may stop one rank and not another.
        stop, end = self._model.stop_training, self._watch.requested
        agreed = self._world.allreduce(int(bool(stop)) | int(end) << 1, op=MPI.BOR)
        self._model.stop_training = bool(agreed & 1)
        more = self._progress.epoch + 1 < self._spec.fit.epochs
        self._preempted = bool(agreed & 2) and more and not self._model.stop_training
        self._progress.stopped_at = self._spec.fit.epochs if agreed & 1 else None

    def _save(self) -> None:
        state = {"learning_rate": self._rate.state, "stopped_at": self._progress.stopped_at}
        self._keeper.save(self._progress, self._states, state)
