"""The training of one rank, from the spec to the report.

It follows ``Model.fit``, hook by hook; `tests/conformance` compares the two.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from mpi4py import MPI

from ..data.manifest import Manifest
from ..data.read.reader import DatasetReader
from ..errors import ModelError
from ..launch.worker.reporting import report_progress
from ..rundir.directory import RunDirectory
from .agreement import check_ranks_agree
from .artifact import save_model
from .build import BuiltModel
from .callback_state import CallbackStates
from .callbacks import Callbacks, check_callbacks, overrides
from .collectives import broadcast
from .epochs import Epochs, Step
from .initial_weights import load_initial_weights
from .keeper import Keeper
from .learning_rate import LearningRate
from .metrics import epoch_logs, numbers, plain
from .model import finalize_layers
from .preemption import PreemptionWatch
from .probe import Probe
from .progress import PhaseWatch, Progress, ProgressReporter
from .random_state import make_generators, separate_generators
from .rank_state import restore_rank
from .spec import TrainingReport, TrainingSpec
from .state import TrainingVariables
from .step import PREEMPT, SAVE, STOP

logger = logging.getLogger(__name__)


def train(spec: TrainingSpec) -> TrainingReport:
    """Train on this rank, together with all others.

    Raises:
        ModelError: the model cannot be trained on these columns.
        RunDirectoryError: the checkpoint to go on from is another model's.
        CheckpointError: a checkpoint could not be written.
        RanksDivergedError: a callback or train_step made the ranks' models differ.
    """
    phases = PhaseWatch()
    hvd.init()
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)
    keras.utils.set_random_seed(spec.fit.seed)
    # That leaves this one as it comes, from noise: no two runs would be the same.
    tf.random.set_global_generator(tf.random.Generator.from_seed(spec.fit.seed + hvd.rank()))
    with PreemptionWatch() as watch:
        training = Training(spec, MPI.COMM_WORLD, watch, phases)
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
        phases: notes where the time goes.
    """

    def __init__(
        self, spec: TrainingSpec, world: MPI.Comm, watch: PreemptionWatch, phases: PhaseWatch
    ) -> None:
        self._spec = spec
        self._world = world
        self._watch = watch
        self._phases = phases
        self._rank, self._size = world.Get_rank(), world.Get_size()
        self._given = check_callbacks(spec.callbacks)
        watched = ("on_train_batch_end", "on_batch_end", "on_test_batch_end")
        self._built = BuiltModel(spec, world, share_logs=overrides(self._given, *watched))
        self._model, self._batches = self._built.model, self._built.batches
        self._steps = self._built.steps
        self._readers: list[DatasetReader] = []
        self._epochs = self._read(spec.train)
        self._validation = (
            None if spec.validation is None else self._read(spec.validation, training=False)
        )
        self._progress = Progress()
        self._reporter = ProgressReporter(self._rank, spec.fit.epochs)
        self._preempted = False
        self._checked = False

    def _read(self, data: Manifest, *, training: bool = True) -> Epochs:
        spec = self._spec
        # The window may take as much, so a dataset that fits into it can just as well be kept.
        keep = spec.window_bytes
        reader = DatasetReader(data, self._batches.columns, spec.transforms, keep)
        self._readers.append(reader)
        return Epochs(
            reader,
            data,
            spec.fit,
            spec.global_batch,
            spec.window_bytes,
            self._rank,
            self._size,
            training=training,
        )

    # -- before the first step -----------------------------------------------------------------

    def prepare(self) -> None:
        """Bring all ranks to the same state: built, restored or broadcast."""
        make_generators()
        self._variables = TrainingVariables(self._model, self._built.optimizers)
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
        self._share_variables()
        self._variables.separate_seeds(self._rank)
        separate_generators(self._rank)
        self._rate = LearningRate(
            self._built.optimizers, self._spec.fit, self._spec.workers, state.get("learning_rate")
        )
        params = {"verbose": 2 if self._rank == 0 else 0, "epochs": self._spec.fit.epochs}
        self._callbacks = Callbacks(
            self._given,
            self._model,
            self._rank,
            {**params, "steps": self._epochs.steps},
            resumed=self._restored is not None,
        )
        # Before the first collective of the training: all ranks have come this far, or none goes.
        self._world.Barrier()

    def _share_variables(self) -> None:
        broadcast(self._variables.shared, self._world)
        if finalize_layers(self._model):
            self._steps.trace()

    def close(self) -> None:
        self._keeper.close()
        for reader in self._readers:
            reader.close()

    # -- the epochs ----------------------------------------------------------------------------

    def run(self) -> TrainingReport:
        """Train the epochs that are left and save the model."""
        self._phases.end("build")
        self._model.stop_training = False
        resumed_in_epoch = self._begin()
        logs: Mapping[str, Any] | None = None
        while not self._finished:
            logs = self._run_epoch(begun=resumed_in_epoch)
            resumed_in_epoch = False
            if self._preempted:
                self._keeper.finish()
                return self._report("epochs")
        self._phases.end("epochs")
        optimizer = self._model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.finalize_variable_values(self._model.trainable_weights)
        self._callbacks.list.on_train_end(logs)
        self._check_agreement("at the end of the training")
        self._keeper.finish()
        saved = None
        if self._rank == 0:
            saved = save_model(
                RunDirectory(self._spec.run_dir), self._model, self._spec, self._batches.example
            )
        return replace(self._report("save"), saved=saved)

    def _begin(self) -> bool:
        """Begin the training, or go on with it; return whether within an epoch."""
        if self._restored is None:
            self._callbacks.list.on_train_begin()
            self._trace_for_summaries()
            # Keras's BackupAndRestore, on rank 0, may have loaded weights, and says the epoch.
            initial = self._world.bcast(self._model._initial_epoch)
            if initial:
                self._progress.epoch = int(initial)
                self._progress.step = int(initial) * self._epochs.steps
            self._share_variables()
            self._states = CallbackStates(self._callbacks.named)
            return False
        info, own = self._restored
        self._restored = None
        # The hooks set up what callbacks do not keep; what they change is put back.
        values = self._variables.capture()
        self._callbacks.list.on_train_begin()
        self._trace_for_summaries()
        self._states = CallbackStates(self._callbacks.named)
        self._callbacks.restore_history(info.history)
        if info.epoch_step:
            self._begin_epoch()
            if self._model.run_eagerly:  # Keras makes the compiled metrics at their first use
                self._model.test_step(self._batches.data(self._batches.blank))
                self._model.reset_metrics()
        self._variables.restore(values)
        self._share_variables()
        restore_rank(own, self._model, self._variables, self._states)
        return info.epoch_step > 0

    def _trace_for_summaries(self) -> None:
        """Trace the steps again where TensorBoard has opened what a model's summaries go to."""
        if any(isinstance(callback, keras.callbacks.TensorBoard) for callback in self._given):
            self._steps.trace()

    @property
    def _finished(self) -> bool:
        epochs = self._spec.fit.epochs
        # A run that a callback ended early is over, until more epochs are asked for.
        return self._progress.epoch >= epochs or self._progress.stopped_at == epochs

    def _report(self, last_phase: str) -> TrainingReport:
        rows = self._world.allreduce(self._progress.rows)
        seconds = self._progress.seconds
        self._phases.end(last_phase)
        return TrainingReport(
            history=self._progress.history,
            samples_per_second=rows / seconds if seconds else 0.0,
            train_seconds=seconds,
            preempted_at=self._progress.step if self._preempted else None,
            timings=self._phases.seconds,
        )

    def _begin_epoch(self) -> None:
        self._model.reset_metrics()
        self._callbacks.list.on_epoch_begin(self._progress.epoch)

    def _run_epoch(self, begun: bool) -> Mapping[str, Any]:
        progress, steps = self._progress, self._epochs.steps
        if not begun:
            self._begin_epoch()
        time_before, rows_before = time.monotonic(), progress.rows
        last: tuple[Any, float] = ({}, 1.0)
        with contextlib.closing(
            self._epochs.steps_from(progress.epoch, progress.epoch_step)
        ) as reading:
            for step in reading:
                logs, leave = self._run_step(step)
                last = logs, step.fraction
                if leave:
                    break
        seconds = time.monotonic() - time_before
        progress.seconds += seconds
        if self._preempted:
            return {}
        names = self._built.exchange.logged.get("train", set())
        results = epoch_logs(self._model, last[0], names, last[1])
        if self._validation is not None and self._spec.fit.validates(progress.epoch):
            results.update(self._evaluate(self._validation))
        logs = self._callbacks.end_epoch(progress.epoch, results)
        self._agree()
        self._check_agreement(f"at the end of epoch {progress.epoch + 1}")
        progress.history.append(plain(logs))
        progress.epoch += 1
        progress.epoch_step = 0
        rate = self._world.allreduce(progress.rows - rows_before) / max(seconds, 1e-9)
        self._reporter.epoch(progress, steps, rate)
        self._save()
        return results

    def _run_step(self, step: Step) -> tuple[Any, bool]:
        """Run one step; return its logs, and whether the ranks have agreed to leave the epoch."""
        progress, steps = self._progress, self._epochs.steps
        self._keeper.poll()
        self._rate.before_step(progress.epoch + step.number / steps)
        begins, ends, end = self._execution(step.number, steps)
        if begins and self._callbacks.watch_begin:
            self._callbacks.list.on_train_batch_begin(step.number)
        logs, requests = self._train_step(step)
        progress.step += 1
        progress.epoch_step = step.number + 1
        if not self._checked:
            self._check_first(step, logs)
        if ends and self._callbacks.watch_end:
            self._callbacks.list.on_train_batch_end(end, logs)
        self._reporter.step(progress, steps, logs)
        if requests[STOP] or (ends and self._callbacks.watch_end and self._stop_is_asked()):
            self._model.stop_training = True
            return logs, True
        self._preempted = bool(requests[PREEMPT])
        last = progress.epoch_step == steps  # the epoch's own checkpoint follows
        due = requests[SAVE] or self._keeper.wants(progress.step)
        if self._preempted or (due and not last):
            self._save()
        return logs, self._preempted

    def _execution(self, number: int, steps: int) -> tuple[bool, bool, int]:
        """Tell whether a step begins and ends what Keras calls an execution, and its last step."""
        length = self._model.steps_per_execution
        end = number - number % length + length - 1
        return number % length == 0, number in (end, steps - 1), end

    def _stop_is_asked(self) -> bool:
        # Callbacks may look at their own clock: what one rank decides, all do.
        return bool(self._world.allreduce(int(bool(self._model.stop_training)), op=MPI.MAX))

    def _check_first(self, step: Step, logs: Any) -> None:
        """Check, after the first step, what only then can be told."""
        self._checked = True
        self._keeper.check_metric(numbers(plain(logs)))
        self._check_agreement("after the first step")

    def _train_step(self, step: Step) -> tuple[Any, Any]:
        asked = (self._model.stop_training, self._keeper.clock_is_due(), self._watch.requested)
        if not self._checked and self._size > 1:
            self._probe(step)
        if step.batch.rows == 0:
            # Fewer rows than ranks: take part in the exchange with a row that counts for nothing.
            data = self._batches.training_data(self._batches.blank)
        else:
            data = self._batches.training_data(step.batch.arrays)
        self._built.exchange.want_logs(step.number == self._epochs.steps - 1)
        if step.equal:
            logs, counts = self._steps.train_full(data, asked)
        else:
            logs, counts = self._steps.train(data, step.fraction, asked)
        self._progress.rows += step.batch.rows
        return logs, counts.numpy()

    def _probe(self, step: Step) -> None:
        """Check, on rank 0, what the user wrote; all ranks raise what it finds."""
        error: ModelError | None = None
        if self._rank == 0 and step.batch.rows:
            try:
                Probe(self._model, self._batches.data(step.batch.arrays)).run()
            except ModelError as raised:
                error = raised
            except Exception as raised:  # user code that only works inside its own step
                logger.info("losses and metrics were not tried beforehand: %r", raised)
        error = self._world.bcast(error)
        if error is not None:
            raise error

    def _evaluate(self, epochs: Epochs) -> dict[str, Any]:
        callbacks = self._callbacks.list
        self._model.stop_evaluating = False
        callbacks.on_test_begin()
        self._model.reset_metrics()
        last: tuple[Any, float] = ({}, 1.0)
        with contextlib.closing(epochs.steps_from(0)) as reading:
            for step in reading:
                begins, ends, end = self._execution(step.number, epochs.steps)
                if begins and self._callbacks.watch_test:
                    callbacks.on_test_batch_begin(step.number)
                arrays = step.batch.arrays if step.batch.rows else self._batches.blank
                self._built.exchange.want_logs(step.number == epochs.steps - 1)
                logs = self._steps.test(self._batches.data(arrays), step.fraction)
                report_progress()
                last = logs, step.fraction
                if ends and self._callbacks.watch_test:
                    callbacks.on_test_batch_end(end, logs)
                    if self._world.allreduce(int(self._model.stop_evaluating), op=MPI.MAX):
                        break
        names = self._built.exchange.logged.get("test", set())
        results = epoch_logs(self._model, last[0], names, last[1])
        callbacks.on_test_end(results)
        return {f"val_{name}": value for name, value in results.items()}

    def _check_agreement(self, when: str) -> None:
        check_ranks_agree(self._variables.shared, self._world, when)

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
