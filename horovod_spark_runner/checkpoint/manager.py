"""Save a training's checkpoints: when one is due, and taking it on all ranks together.

Taking one stops the training only for a copy of the values and one small gather of the rank states;
a thread of rank 0 writes it. `horovod_spark_runner.checkpoint.resume` restores it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..cluster.worker.reporting import notify
from ..config.training import CheckpointOptions
from ..errors import CheckpointError, InvalidInputError
from ..storage.arrays import Arrays
from ..storage.retries import retry
from ..sync.synchroniser import Synchroniser
from .files import RANKS_FILE, VARIABLES_FILE, CheckpointInfo, prune_checkpoints, save_checkpoint
from .rank_state import capture_rank, join_states
from .resume import RestoredCheckpoint
from .run_directory import Account, RunDirectory

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..training.progress import Progress
    from ..training.spec import TrainingSpec
    from ..training.trainee import Hooks, Trainee

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Takes the checkpoints of one rank, together with all others.

    Args:
        spec: the training.
        world: communicator of all ranks.
        trainee: the built model.
        synchroniser: defines which state is shared, and saved once.
        restored: the checkpoint that the training resumes from, if any.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        world: MPI.Comm,
        trainee: Trainee,
        synchroniser: Synchroniser,
        restored: RestoredCheckpoint | None = None,
    ) -> None:
        self._spec = spec
        self._options = spec.config.checkpoints
        self._world = world
        self._rank = world.Get_rank()
        self._trainee = trainee
        self._variables = trainee.variables
        self._synchroniser = synchroniser
        # As it was compiled: callbacks may change it later.
        self._model: Mapping[str, Any] = {}
        if self._rank == 0:
            self._model = trainee.describe() if restored is None else restored.model
        self._metric_known = spec.config.checkpoints.best_metric is None
        self._last = time.monotonic()
        self._snapshot: Arrays | None = None
        self._directory = spec.directory
        self._writer = _CheckpointWriter(self._directory, spec.config.checkpoints)

    # -- taking one ----------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether one is due after ``step`` steps of the run; the same on all ranks."""
        every = self._options.every_steps
        return every is not None and step % every == 0

    def is_due_by_clock(self) -> bool:
        """Return whether this rank requests one because of ``every_minutes``."""
        minutes = self._options.every_minutes
        if self._rank or minutes is None:
            return False
        return time.monotonic() - self._last >= 60 * minutes

    def save(
        self,
        progress: Progress,
        hooks: Hooks,
        state: dict[str, Any],
        accounts: Sequence[Account],
        report: Callable[[], None],
    ) -> None:
        """Take a checkpoint; every rank must call it at the same step, where all have met.

        Args:
            progress: the training's progress.
            hooks: its callbacks.
            state: state of the training, as JSON.
            accounts: time breakdown of whole epochs; see `RunDirectory.write_metrics`.
            report: called on rank 0 once it is written, or the training continues without it.

        Raises:
            CheckpointError: an earlier one could not be written.
        """
        from mpi4py.util import pkl5

        captured = capture_rank(
            self._trainee,
            hooks,
            self._synchroniser,
            rank=self._rank,
            in_epoch=progress.epoch_step > 0,
        )
        # All ranks' states together may have 2 GiB and more, which plain pickles of mpi4py cannot.
        states = pkl5.Intracomm(self._world).gather(captured)
        self._last = time.monotonic()
        if states is None:
            return
        self._look_for_metric(progress)
        info = CheckpointInfo(
            step=progress.step,
            epoch=progress.epoch,
            history=list(progress.history),
            data_fingerprint=self._spec.train.fingerprint,
            tables=dict(self._spec.train.tables),
            variables=self._variables.describe(),
            engine=self._spec.engine,
            epoch_step=progress.epoch_step,
            world=len(states),
            run_id=self._spec.run_id,
            order=self._spec.order,
            settings=self._spec.settings,
            state=state,
            rank_states=[rank_state.values for rank_state in states],
            model={**self._model, "trained_by": self._variables.trained_by()},
        )
        self._writer.wait()  # until the snapshot taken before is written
        self._snapshot = self._variables.capture(self._snapshot)
        files = {VARIABLES_FILE: self._snapshot, RANKS_FILE: join_states(states)}
        self._writer.submit(info, files, tuple(accounts), report)

    def check_metric(self, logs: dict[str, float]) -> None:
        """Check, after the first step, that ``best_metric`` will exist.

        Raises:
            InvalidInputError: it will not.
        """
        if self._metric_known:
            return
        names = sorted(logs)
        if self._spec.validation is not None:
            names += [f"val_{name}" for name in names]
        if self._options.best_metric not in names:
            raise InvalidInputError(
                f"unknown best_metric={self._options.best_metric!r}; this training has "
                + ", ".join(names)
            )
        self._metric_known = True

    def _look_for_metric(self, progress: Progress) -> None:
        """Warn, after the first epoch that has all results, if ``best_metric`` is none of them.

        Some results are unknown after the first step: those of a model's own steps, and those that
        callbacks add, perhaps not in every epoch.
        """
        validates = self._spec.has_all_results(progress.epoch - 1)
        if self._metric_known or progress.epoch_step or not progress.history or not validates:
            return
        self._metric_known = True
        results = progress.history[-1]
        if self._options.best_metric not in results:
            notify(
                f"best_metric={self._options.best_metric!r} is missing from epoch "
                f"{progress.epoch}, which has {', '.join(sorted(results))}; only a checkpoint of "
                "an epoch that has it is kept as the best"
            )

    def poll(self) -> None:
        """Raise the error of an earlier write, if any."""
        self._writer.poll()

    def finish(self) -> None:
        """Wait until all checkpoints are written."""
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()


# Of Linux' -20 to 19: a thread of the training gets the core three times as long.
_NICENESS = 5


def _give_way() -> None:
    """Let this thread, and those that it begins, leave most of a core to the training."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a container may forbid it
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(now, _NICENESS))


class _CheckpointWriter:
    """Writes checkpoints of one run.

    Args:
        directory: the run directory, with the token of its lease.
        options: which to keep, and what happens after an error.
        pause: how to wait; for tests.
    """

    def __init__(
        self,
        directory: RunDirectory,
        options: CheckpointOptions,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = directory
        self._options = options
        self._pause = pause
        # Of other storage, the clients begin threads that read rows as well.
        give_way = _give_way if directory.location.is_local else None
        self._pool = ThreadPoolExecutor(1, "hsr-checkpoint", initializer=give_way)
        self._pending: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None and not self._pending.done()

    def submit(
        self,
        info: CheckpointInfo,
        files: Mapping[str, Arrays],
        accounts: Sequence[Account] = (),
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint in the background, after the one before.

        Args:
            info: all of it but its arrays.
            files: its arrays, by file; they must not change any more.
            accounts: see `RunDirectory.write_metrics`.
            report: called by the thread once it is written, or the training continues without it.

        Raises:
            CheckpointError: the one before could not be written, and ``on_error`` is ``raise``.
            RunDirectoryError: another run has taken the run directory over.
        """
        self.wait()
        self._pending = self._pool.submit(self._write_and_report, info, files, accounts, report)

    def poll(self) -> None:
        """Raise the error of an earlier write, as `submit` does; never wait."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written; raise as `submit` does."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointError as error:
            if self._options.on_error == "raise":
                raise
            logger.warning("%s. The training continues", error)

    def close(self) -> None:
        """Finish the current write, also if the training has failed."""
        self._pool.shutdown(wait=True)

    def _write_and_report(
        self,
        info: CheckpointInfo,
        files: Mapping[str, Arrays],
        accounts: Sequence[Account],
        report: Callable[[], None],
    ) -> None:
        try:
            self._write(info, files, accounts)
        except CheckpointError:
            if self._options.on_error == "raise":
                raise
            report()
            raise
        report()

    def _write(
        self, info: CheckpointInfo, files: Mapping[str, Arrays], accounts: Sequence[Account]
    ) -> None:
        what = f"the checkpoint of step {info.step} could not be written"
        try:
            retry(
                functools.partial(self._write_once, info, files, accounts),
                f"{what} to {self._directory.checkpoints}",
                "Earlier ones are untouched; once the storage works again, the same call resumes "
                "from the newest. With on_error='warn' the training continues without",
                self._pause,
            )
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise CheckpointError(
                f"{what}: run_dir {self._directory.location}, or what it held, was deleted while "
                f"this run wrote to it ({error.__cause__}), and so may be the checkpoints before"
            ) from error.__cause__

    def _write_once(
        self, info: CheckpointInfo, files: Mapping[str, Arrays], accounts: Sequence[Account]
    ) -> None:
        self._directory.check_held()
        save_checkpoint(self._directory, info, files)
        self._directory.write_metrics(info.history, accounts)
        prune_checkpoints(self._directory, info.step, self._options)
