"""The training of one rank, from the spec to the report. Knows no framework.

It follows Keras' ``Model.fit``, hook by hook; `tests/conformance` compares the two. In this order,
hooks of callbacks with a star, and with braces where all ranks meet::

    build the model; restore the checkpoint, or load initial weights; {broadcast variables}
    * train_begin
    for each epoch:
        reset metrics;  * epoch_begin
        for each step of this rank:
            read its part of the batch; set the learning rate;  * train_step_begin
            {try the step on parts of a batch}             at steps 1, 2, 4, 8, …
            {train_step: exchange gradients and requests}  or alone, and then {meet} if it is due
            {compare variables}                            after the first step
            * train_step_end
            leave the epoch if one requests STOP; save if SAVE; save and leave the run if PREEMPT
        {merge metrics}
        evaluate:  * test_begin, test_step_begin, test_step_end, test_end; {merge metrics}
        * epoch_end;  {agree on STOP and PREEMPT; compare variables}
        history, progress, event files; save a checkpoint
    * train_end;  {compare variables}; rank 0 saves the model
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.model_state import broadcast, preserve_shared
from ..checkpoint.rank_state import restore_hooks, restore_rank
from ..checkpoint.resume import restore_checkpoint
from ..cluster.protocol.processes import SignalWatch
from ..cluster.worker.reporting import notify, report_progress
from ..config.prediction import added_columns
from ..config.sync import Allreduce, AsyncServer, DiLoCo, LocalSGD
from ..config.training import TrainingConfig
from ..data.manifest import Manifest
from ..data.read.reader import DatasetReader
from ..observe.event_files import EventFiles
from ..storage.arrays import Arrays
from ..sync.allreduce import AllreduceSynchroniser
from ..sync.asynchronous import AsyncSynchroniser
from ..sync.compressed import CompressedSynchroniser
from ..sync.local_sgd import LocalSGDSynchroniser
from ..sync.mpi import MpiRanks, MpiWire
from ..sync.synchroniser import Collectives, Synchroniser
from ..typed_json import JsonObject
from .agreement import Agreement, StepTrials, changed_since, check_ranks_agree, checksums
from .engine import engine_named
from .epochs import PREEMPT, SAVE, STOP, Epochs, Step, batch_schedule, execution, was_asynchronous
from .learning_rate import LearningRate
from .progress import Logs, Progress, ProgressReporter, numbers, plain
from .sample_rows import SAMPLE_COUNT, few_rows
from .spec import TrainingReport, TrainingSpec, provide_steps
from .time_breakdown import Accounts, Clock, Kind, phases
from .traces import Traces
from .trainee import Trainee

# Makes a synchroniser from its settings and the framework's collectives.
_SynchroniserFactory = Callable[[Any, Collectives], Synchroniser]


def _allreduce(options: Allreduce, collectives: Collectives) -> Synchroniser:
    """Return the synchroniser that adds up gradients in every step, compressed or not."""
    compression = options.compression
    if compression == "none" or compression == "fp16":  # the framework's sums support it
        return AllreduceSynchroniser(compression, collectives)
    return CompressedSynchroniser(compression, collectives, MpiWire())


def _asynchronous(options: AsyncServer, collectives: Collectives) -> Synchroniser:
    """Return the synchroniser of asynchronous ranks."""
    return AsyncSynchroniser(options, collectives, MpiRanks())


# Makes the strategy of a `sync` setting, by the setting's class.
SYNCHRONISERS: dict[type, _SynchroniserFactory] = {
    Allreduce: _allreduce,
    LocalSGD: LocalSGDSynchroniser,
    DiLoCo: LocalSGDSynchroniser,
    AsyncServer: _asynchronous,
}


def train(
    spec: TrainingSpec,
    make_synchroniser: _SynchroniserFactory | None = None,
    began: float | None = None,
) -> TrainingReport:
    """Train on this rank, together with all others.

    Args:
        spec: what to train.
        make_synchroniser: makes the way of synchronising; by default that of ``spec.config.sync``.
        began: when this rank began, by `time.perf_counter`; by default, now.

    Raises:
        ModelError: the model cannot be trained on these columns.
        RunDirectoryError: the checkpoint to resume from is another model's.
        CheckpointError: a checkpoint could not be written.
        RanksDivergedError: a callback or train_step made the ranks' models differ.
        EnvironmentProblem: an environment variable changes the framework.
        InvalidInputError: the outputs cannot be what predictions are asked for.
    """
    clock = Clock(began=began)
    engine = engine_named(spec.engine)
    engine.begin(spec.fit.seed, os.environ)
    make_synchroniser = make_synchroniser or SYNCHRONISERS[type(spec.config.sync)]
    synchroniser = make_synchroniser(spec.config.sync, engine.collectives())
    spec = replace(spec, sample=_first_rows(spec, MPI.COMM_WORLD))
    with SignalWatch(signal.SIGTERM) as watch, provide_steps(spec.steps):
        trainee = engine.trainee(spec, MPI.COMM_WORLD, synchroniser)
        _check_outputs(spec.config, trainee)
        training = _Training(spec, MPI.COMM_WORLD, trainee, synchroniser, watch, clock)
        training.prepare()
        try:
            ended = training.run()
        finally:
            training.close()
        return training.report(ended)


def _check_outputs(config: TrainingConfig, trainee: Trainee) -> None:
    """Check that the model's outputs fit the requested predictions.

    Raises:
        InvalidInputError: the outputs do not fit the predictions.
    """
    check, columns = config.check_outputs, config.prediction_col
    if check is None and (columns is None or isinstance(columns, str)):  # they fit any outputs
        return
    outputs = trainee.outputs()
    if outputs is None:  # not known before the first step
        return
    added_columns([output.name for output in outputs], columns)
    if check is not None:
        check(outputs)


def _first_rows(spec: TrainingSpec, world: MPI.Comm) -> Arrays:
    """Return a few rows to try the model with, the same on all ranks."""
    rows: Arrays | None = None
    if world.Get_rank() == 0:
        with contextlib.closing(
            DatasetReader(spec.train, spec.columns, spec.config.data.transforms)
        ) as reader:
            rows = few_rows(reader.first_rows(SAMPLE_COUNT, spec.fit.seed))
    rows = world.bcast(rows)
    assert rows is not None
    return rows


class _Training:
    """The state of one rank's training.

    Args:
        spec: what to train.
        world: communicator of all ranks, for what is agreed on outside the step.
        trainee: the model on this rank.
        synchroniser: what the model was built with.
        watch: notes the request to end soon.
        clock: notes where the time goes.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        world: MPI.Comm,
        trainee: Trainee,
        synchroniser: Synchroniser,
        watch: SignalWatch,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._world = world
        self._trainee = trainee
        self._variables = trainee.variables
        self._sync = synchroniser
        self._agreement = Agreement(world)
        self._trials = StepTrials(world, trainee.probe, trainee.is_tried_alone)
        self._watch = watch
        self._clock = clock
        self._accounts = Accounts(world, clock, trainee.exchange_seconds, synchroniser.traffic)
        self._rank, self._size = world.Get_rank(), world.Get_size()
        self._readers: list[DatasetReader] = []
        self._epochs = self._read(spec.train)
        self._validation = (
            None if spec.validation is None else self._read(spec.validation, training=False)
        )
        events = self._rank == 0 and spec.config.checkpoints.event_files
        self._events = EventFiles(spec.directory) if events else None
        self._traces = Traces(spec, self._rank, trainee.tracer())
        self._progress = Progress()
        self._rates: dict[str, float] = {}
        self._reporter = ProgressReporter(
            self._rank, spec.fit, spec.validation, self._accounts, alone=self._size == 1
        )
        self._preempted = self._checked = self._save_due = self._warned = False

    def _read(self, data: Manifest, *, training: bool = True) -> Epochs:
        spec = self._spec
        # A dataset that fits into the window is kept: it takes no more memory.
        options = spec.config.data
        reader = DatasetReader(
            data,
            self._trainee.columns,
            options.transforms,
            options.window_bytes,
            augment=training,
        )
        self._readers.append(reader)
        sizes = spec.global_batch, options.window_bytes, self._rank, self._size
        # Transforms may share what callbacks change.
        ahead = training and not options.transforms
        return Epochs(reader, data, spec.fit, *sizes, training=training, ahead=ahead)

    # -- before the first step -----------------------------------------------------------------

    def prepare(self) -> None:
        """Bring all ranks to the same state: built, restored or broadcast."""
        self._restored = restore_checkpoint(self._spec, self._world, self._trainee)
        self._checkpoints = CheckpointManager(
            self._spec, self._world, self._trainee, self._sync, self._restored
        )
        is_due = self._checkpoints.is_due
        self._schedule = batch_schedule(
            self._sync, self._epochs, self._world, self._agreement, is_due
        )
        state: JsonObject = {}
        if self._restored is not None:
            info = self._restored.info
            state = info.state
            self._progress = Progress.of(info)
            if self._rank == 0:
                directory = self._spec.directory
                self._accounts.epochs = directory.read_accounts(len(info.history))
                if self._progress.is_finished(self._spec.fit.epochs):
                    # Storage may have been full after the last checkpoint.
                    directory.write_metrics(info.history, self._accounts.epochs)
            self._schedule.restore(state, self._progress)
        elif self._spec.warm_start is not None and self._rank == 0:
            self._trainee.load_initial_weights(self._spec.warm_start)
        self._share_variables()
        self._variables.separate_seeds(self._rank)
        self._trainee.separate_random_streams(self._rank)
        scaling = self._spec.fit.lr_scaling
        rates = None if scaling == "none" else self._trainee.rates(scaling)
        rate_state = state.get("learning_rate")
        self._rate = LearningRate(rates, self._spec.fit, self._spec.workers, rate_state)
        resumed = self._restored is not None
        self._hooks = self._trainee.hooks(steps=self._epochs.steps, resumed=resumed)
        # Before the training's first collective: all ranks arrive, or none continues.
        self._world.Barrier()

    def _share_variables(self) -> None:
        broadcast(self._variables, self._world)
        self._trainee.variables_were_set()

    def close(self) -> None:
        self._clock.to(Kind.SAVE)
        self._traces.close()
        self._checkpoints.close()
        if self._events is not None:
            self._events.close()
        self._epochs.close()
        for reader in self._readers:
            reader.close()

    # -- the epochs ----------------------------------------------------------------------------

    def run(self) -> JsonObject:
        """Train the remaining epochs and save the model; return its description."""
        self._clock.to(Kind.CALLBACKS)
        self._hooks.stop_training = False
        resumed_in_epoch = self._begin()
        self._sync.begin(self._variables)
        logs: Logs | None = None
        while not self._progress.is_finished(self._spec.fit.epochs):
            logs = self._run_epoch(resumed=resumed_in_epoch)
            resumed_in_epoch = False
            if self._preempted:
                self._checkpoints.finish()
                return {}
        self._clock.to(Kind.SAVE)
        weights = self._variables.groups["model"]
        before = checksums(self._variables, weights)
        self._trainee.finish()
        self._hooks.train_end(logs)
        self._check_agreement("at the end of the training")
        self._checkpoints.finish()
        changed = changed_since(before, self._variables, weights, self._world)
        final = plain(self._evaluate()) if changed and self._spec.config.is_trial else None
        saved = self._trainee.save(self._spec.directory) if self._rank == 0 else None
        return {"saved": saved, "final": final, "weights": self._describe_weights(changed)}

    def _describe_weights(self, changed: bool) -> str:
        """Describe of which epoch the trained model's weights are.

        Args:
            changed: whether they have changed since the last epoch's end.
        """
        last = f"epoch {self._progress.epoch:,}, the last"
        if not changed:
            return last
        by_others = f"changed after {last}, by the optimizer or a callback's on_train_end"
        return self._hooks.restored or by_others

    def _begin(self) -> bool:
        """Begin or resume the training; return whether it resumes within an epoch."""
        if self._restored is None:
            self._hooks.train_begin()
            # A callback of rank 0 may have loaded weights, and set the epoch.
            initial = self._world.bcast(self._hooks.initial_epoch)
            if initial:
                self._progress.epoch = initial
                self._progress.step = initial * self._epochs.steps
            self._share_variables()
            self._hooks.snapshot()
            return False
        info, rank_state = self._restored.info, self._restored.rank_state
        self._restored = None
        # `train_begin` sets up unsaved state; variables that it changes are restored below.
        values = self._variables.capture()
        if self._hooks.restored_first:
            restore_hooks(rank_state, self._hooks)
        self._hooks.train_begin()
        self._hooks.snapshot()
        self._hooks.restore_history(info.history)
        if info.epoch_step:
            self._begin_epoch()
            self._trainee.make_metrics()
        self._variables.restore(values)
        self._share_variables()
        # Also state that the epoch's begin has reset.
        again = info.epoch_step or not self._hooks.restored_first
        hooks = self._hooks if again else None
        restore_rank(rank_state, self._trainee, hooks, self._sync)
        if was_asynchronous(info.state):
            self._rate.share(self._world)
        return info.epoch_step > 0

    def report(self, ended: JsonObject) -> TrainingReport:
        """Return the report of a training, from the result of `run`, once all is closed."""
        rows, seconds = self._world.allreduce(self._progress.rows), self._progress.seconds
        return TrainingReport(
            history=self._progress.history,
            samples_per_second=rows / seconds if seconds else 0.0,
            train_seconds=seconds,
            preempted_at=self._progress.step if self._preempted else None,
            timings=phases(self._accounts.seconds()),
            accounts=self._accounts.totals(),
            staleness=self._schedule.lateness(),
            **ended,
        )

    def _begin_epoch(self) -> None:
        self._trainee.reset_metrics()
        self._hooks.epoch_begin(self._progress.epoch)

    def _run_epoch(self, resumed: bool) -> Logs:
        progress, steps = self._progress, self._epochs.steps
        if not resumed:
            self._begin_epoch()
            if not self._sync.in_step:  # servers take a part of the weights from each rank
                self._check_agreement(f"at the beginning of epoch {progress.epoch + 1}")
        time_before, rows_before = time.monotonic(), progress.rows
        logs, last = self._run_steps()
        self._clock.to(Kind.AGREE)
        seconds = time.monotonic() - time_before
        progress.seconds += seconds
        if self._preempted:
            return {}
        results = self._trainee.results("train", logs, self._schedule.last_fraction(last))
        if self._validation is not None and self._spec.fit.validates(progress.epoch):
            with self._clock.during(Kind.VALIDATION):
                results.update(self._evaluate())
        with self._clock.during(Kind.CALLBACKS):
            ended = self._hooks.epoch_end(progress.epoch, results)
        self._agree()
        self._check_agreement(f"at the end of epoch {progress.epoch + 1}")
        progress.history.append(plain(ended))
        self._warn_of_loss(progress)
        progress.epoch += 1
        progress.epoch_step = 0
        rate = self._accounts.end_epoch(progress.rows - rows_before, seconds, self._rates)
        report = self._reporter.epoch(progress, steps, rate)
        if self._events is not None:
            facts = {**self._rates, "samples_per_second": rate}
            self._events.epoch(progress.epoch - 1, progress.history[-1], facts)
        self._save(report)
        self._clock.to(Kind.CALLBACKS)
        return results

    def _warn_of_loss(self, progress: Progress) -> None:
        """Warn once of an epoch whose loss is NaN or infinite."""
        loss = progress.history[-1].get("loss", 0.0)
        if self._warned or self._rank or not isinstance(loss, float) or math.isfinite(loss):
            return
        self._warned = True
        notify(
            f"the loss of epoch {progress.epoch + 1} (up to step {progress.step} of the run) is "
            f"{loss}, and what is trained from it on is lost: end such runs by a callback "
            "(Keras: TerminateOnNaN), clip gradients, lower the learning rate, and look for NaN "
            "and very large values in the columns"
        )

    def _run_steps(self) -> tuple[Logs | None, Step | None]:
        """Run the remaining steps of an epoch; return this rank's last step and its logs."""
        logs: Logs | None = {}
        step = None
        while not self._preempted:
            self._clock.to(Kind.DATA)
            with contextlib.closing(self._schedule.steps(self._progress)) as reading:
                for step in reading:
                    self._clock.to(Kind.CALLBACKS)
                    logs, leave = self._run_step(step)
                    self._clock.to(Kind.DATA)
                    if leave:
                        break
            self._clock.to(Kind.EXCHANGE)
            self._sync.meet(self._variables)
            requests = self._schedule.end(self._progress)
            if requests[STOP]:
                self._hooks.stop_training = True
            if requests[STOP] or not any(requests):
                break
            self._preempted = bool(requests[PREEMPT])
            self._save()
        return logs, step

    def _run_step(self, step: Step) -> tuple[Logs | None, bool]:
        """Run one step; return its logs, and whether the ranks have agreed to leave the epoch."""
        progress, steps = self._progress, self._epochs.steps
        self._checkpoints.poll()
        self._traces.before(progress.step)
        self._rate.before_step(progress.epoch + step.number / steps)
        begins, ends, end = execution(step.number, steps, self._trainee.steps_per_execution)
        if begins and self._hooks.watch_begin:
            self._hooks.train_step_begin(step.number)
        local_requests = self._local_requests()
        if not ends:  # an execution is not left within
            local_requests = (False, *local_requests[1:])
        self._clock.to(Kind.EXCHANGE)
        self._sync.before_step(progress.step)
        self._clock.to(Kind.STEP if self._checked else Kind.FIRST_STEP)
        if self._trials.is_due():
            together = self._sync.in_step or not self._checked
            with self._clock.during(Kind.FIRST_STEP):
                self._trials.run(step, progress.step + 1, together=together)
        # A rank without rows joins common steps; a step of its own must not change its model.
        idle = not step.batch.rows and not self._sync.meets_in_every_step
        with preserve_shared(self._variables) if idle else contextlib.nullcontext():
            logs, requests = self._trainee.train_step(
                step, local_requests, step.number == steps - 1
            )
        self._clock.to(Kind.CALLBACKS)
        ends_watched = ends and self._hooks.watch_end
        if step.number == steps - 1 or ends_watched or not self._sync.in_step:
            self._note_rates()  # callbacks may set others from here on
        progress.rows += step.batch.rows
        further = progress.to_step(step.number + 1)
        met = True
        if requests is None:  # the step is this rank's alone
            self._clock.to(Kind.EXCHANGE)
            met = self._sync.after_step(self._variables, progress.step, step.batch.rows)
            requests = self._agreement.after_step(local_requests, met)
            self._clock.to(Kind.CALLBACKS)
        self._traces.after(progress.step)
        if not self._checked:
            self._check_first(logs, met)
        if ends_watched:
            self._hooks.train_step_end(end, logs)
        self._reporter.step(progress, steps, logs, further * step.rows)
        # Callbacks may have taken longer on other ranks, which this one waits for here.
        with self._clock.during(Kind.EXCHANGE):
            stop = requests[STOP] or self._schedule.stops(
                self._local_requests(), watched=ends_watched
            )
        if stop:
            if not ends_watched:
                self._note_rates()
            self._hooks.stop_training = True
            return logs, True
        last = progress.epoch_step == steps  # the epoch's end and its own checkpoint follow
        self._preempted = bool(requests[PREEMPT]) and not last
        self._save_due |= bool(requests[SAVE]) or self._checkpoints.is_due(progress.step)
        if self._preempted or (self._save_due and met and not last):
            self._save()
        return logs, self._preempted

    def _local_requests(self) -> tuple[bool, bool, bool]:
        """Return this rank's requests to all; see `epochs.STOP`."""
        return self._hooks.stop_training, self._checkpoints.is_due_by_clock(), self._watch.requested

    def _note_rates(self) -> None:
        if self._rank == 0:
            self._rates = self._trainee.learning_rates()

    def _check_first(self, logs: Logs | None, met: bool) -> None:
        """Run the checks that need the results of the first step."""
        self._checked = True
        self._accounts.first_step_ended()
        if self._trainee.has_complete_logs:
            self._checkpoints.check_metric(numbers(plain(logs)))
        if met:
            self._check_agreement("after the first step")

    def _evaluate(self) -> dict[str, object]:
        """Return the results over the validation rows of all ranks, as an epoch names them."""
        epochs, trainee, hooks = self._validation, self._trainee, self._hooks
        if epochs is None:
            return {}
        hooks.stop_evaluating = False
        hooks.test_begin()
        trainee.reset_metrics()
        last: tuple[Logs | None, float] = ({}, 1.0)
        with contextlib.closing(epochs.steps_from(0)) as reading:
            for step in reading:
                length = trainee.steps_per_execution
                begins, ends, end = execution(step.number, epochs.steps, length)
                if begins and hooks.watch_test:
                    hooks.test_step_begin(step.number)
                logs = trainee.test_step(step, step.number == epochs.steps - 1)
                report_progress()
                last = logs, step.fraction
                if ends and hooks.watch_test:
                    hooks.test_step_end(end, logs)
                    if self._agreement.any_requests(hooks.stop_evaluating):
                        break
        results = trainee.results("test", *last)
        hooks.test_end(results)
        return {f"val_{name}": value for name, value in results.items()}

    def _check_agreement(self, when: str) -> None:
        with self._clock.during(Kind.AGREE):
            check_ranks_agree(self._variables, self._world, when, self._sync.synced_state)

    def _agree(self) -> None:
        """Agree with all ranks whether to stop, and whether one was asked to end soon."""
        # A callback that counts its own time or batches may stop one rank and not another.
        stop, end = self._agreement.at_epoch_end(self._hooks.stop_training, self._watch.requested)
        self._hooks.stop_training = stop
        more = self._progress.epoch + 1 < self._spec.fit.epochs
        self._preempted = end and more and not stop
        self._progress.stopped_at = self._spec.fit.epochs if stop else None

    def _save(self, report: Callable[[], None] = lambda: None) -> None:
        self._save_due = False
        state = {
            "learning_rate": self._rate.state,
            "stopped_at": self._progress.stopped_at,
            **self._schedule.state(),
        }
        with self._clock.during(Kind.CHECKPOINT):
            self._checkpoints.save(
                self._progress, self._hooks, state, self._accounts.epochs, report
            )
