"""Checkpoints of a training: when one is due, taking it together, and going on from one.

Taking one stops the training only for a copy of the values and one small gather of what the ranks
keep for themselves; a thread of rank 0 writes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..cluster.protocol.messages import Resumed
from ..cluster.worker.reporting import notify, send
from ..errors import InvalidInputError, RunDirectoryError
from ..storage.arrays import Arrays
from ..storage.filesystem import Location
from ..sync.synchroniser import Synchroniser
from .config_diff import is_over
from .files import (
    RANKS_FILE,
    VARIABLES_FILE,
    CheckpointInfo,
    load_checkpoint,
    newest_readable,
)
from .rank_state import (
    RankState,
    capture_rank,
    join_states,
    split_states,
    state_for,
)
from .run_directory import Account, RunDirectory
from .writer import CheckpointWriter

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..training.progress import Progress
    from ..training.spec import TrainingSpec
    from ..training.trainee import Hooks, Trainee


_OTHER_ROW_ORDER = (
    "the DataFrame gives its rows in another order than before (or another number of partitions), "
    "and the files they were written to are gone"
)


class CheckpointManager:
    """Takes and restores the checkpoints of one rank, together with all others.

    Args:
        spec: the training.
        world: communicator of all ranks.
        trainee: the built model.
        synchroniser: says what is alike on all ranks, which is kept once; each keeps the rest.
    """

    def __init__(
        self, spec: TrainingSpec, world: MPI.Comm, trainee: Trainee, synchroniser: Synchroniser
    ) -> None:
        self._spec = spec
        self._options = spec.config.checkpoints
        self._world = world
        self._rank = world.Get_rank()
        self._trainee = trainee
        self._variables = trainee.variables
        self._synchroniser = synchroniser
        # As it was compiled: what a checkpoint brings and callbacks do comes later.
        self._described = trainee.describe() if self._rank == 0 else {}
        self._metric_known = spec.config.checkpoints.best_metric is None
        self._last = time.monotonic()
        self._snapshot: Arrays | None = None
        self._directory = RunDirectory(spec.run_dir)
        self._writer = CheckpointWriter(
            self._directory, spec.config.checkpoints, spec.attempt.lease_token
        )

    # -- going on ------------------------------------------------------------------------------

    def load(self) -> tuple[CheckpointInfo, RankState] | None:
        """Read the checkpoint to go on from on rank 0, restore what all share, hand out the rest.

        The shared variables are restored on rank 0 only: they are broadcast anyway. Nobody has read
        the arrays before; if they are damaged, it is the checkpoint before that counts.

        Raises:
            RunDirectoryError: it is another model's, or all are damaged.
            CheckpointError: the storage fails.
        """
        if self._spec.attempt.checkpoint is None:
            return None
        info: CheckpointInfo | None = None
        states: list[RankState] | None = None
        if self._rank == 0:
            folder, info, files = self._read(self._spec.attempt.checkpoint)
            self._check_order(folder, info)
            changes = self._check_model(folder, info)
            self._variables.build_optimizers(info.model.get("trained_by", ()))
            self._variables.check_same(info.variables, str(folder), changes)
            self._variables.restore(files[VARIABLES_FILE])
            saved = split_states(info.rank_states, files[RANKS_FILE])
            size = self._world.Get_size()
            states = [state_for(saved, rank, size) for rank in range(size)]
        shared, state = self._world.bcast(info), self._of_any_size().scatter(states)
        assert shared is not None
        self._variables.build_optimizers(shared.model.get("trained_by", ()))
        return shared, state

    def _of_any_size(self) -> MPI.Comm:
        """Return the communicator for objects that may have 2 GiB and more, all ranks' together."""
        from mpi4py.util import pkl5

        return pkl5.Intracomm(self._world)

    def _read(self, newest: int) -> tuple[Location, CheckpointInfo, dict[str, Arrays]]:
        checkpoint = newest_readable(
            self._directory, load_checkpoint, self._spec.run_id, newest=newest, say=notify
        )
        if checkpoint is None:
            raise RunDirectoryError(
                f"checkpoint {self._directory.checkpoint(newest)} is gone, which the run was to go "
                "on from"
            )
        send(Resumed(checkpoint[1].step))
        return checkpoint

    def _check_model(self, folder: Location, info: CheckpointInfo) -> Sequence[str]:
        """Compare the model with that of the run; return how settings of optimizers differ."""
        within = info.epoch_step > 0
        changes = self._trainee.compare(info.model, self._described, in_epoch=within)
        if changes.refusal is not None:
            raise RunDirectoryError(
                f"run_dir holds a run of another model ({folder}): "
                f"{changes.refusal}. Go on with the model the run was begun with, or give another "
                "run_dir; initial_weights takes over what fits"
            )
        for text in () if is_over(info, self._spec.fit.epochs) else changes.warnings:
            notify(f"going on with run_dir {self._spec.run_dir}: {text}")
        self._described = changes.record
        return changes.optimizers

    def _check_order(self, folder: Location, info: CheckpointInfo) -> None:
        """Within an epoch, what is left of it must be what it would have been."""
        rows = info.order.get("row_order"), self._spec.train.row_order
        if info.epoch_step == 0:
            if rows[0] != rows[1] and not is_over(info, self._spec.fit.epochs):
                notify(
                    f"going on with run_dir {self._spec.run_dir}: {_OTHER_ROW_ORDER}, so that what "
                    "is left is trained in another order than the run would have taken them in"
                )
            return
        if rows[0] != rows[1]:
            raise RunDirectoryError(
                f"checkpoint {folder} was taken within epoch {info.epoch + 1}, and "
                f"{_OTHER_ROW_ORDER}: some would be trained on twice in that epoch, and others not "
                "at all. Give the DataFrame in the order it had (sort it by a column before both "
                "calls), or give another run_dir"
            )
        other = {
            name: (info.order.get(name), value)
            for name, value in self._spec.order.items()
            if info.order.get(name) != value
        }
        if other:
            shown = ", ".join(f"{name} {old} (now {new})" for name, (old, new) in other.items())
            raise RunDirectoryError(
                f"checkpoint {folder} was taken within epoch {info.epoch + 1}, and "
                f"what is left of that epoch depends on {shown}. Finish the epoch with the same "
                "values (batch_size times num_workers is the global batch), then change them"
            )

    # -- taking one ----------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Tell, equally on all ranks, whether one is due after ``step`` steps of the run."""
        every = self._options.every_steps
        return every is not None and step % every == 0

    def is_due_by_clock(self) -> bool:
        """Tell whether this rank asks for one because of the time."""
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
        then: Callable[[], None],
    ) -> None:
        """Take a checkpoint; every rank must call it at the same step, where all have met.

        Args:
            progress: how far the training has come.
            hooks: what keeps a state of its own.
            state: of the training, as JSON.
            accounts: where the time of whole epochs went; see `RunDirectory.write_metrics`.
            then: called on rank 0 once it is written.

        Raises:
            CheckpointError: an earlier one could not be written.
        """
        captured = capture_rank(
            self._trainee,
            hooks,
            self._synchroniser,
            rank=self._rank,
            in_epoch=progress.epoch_step > 0,
        )
        states = self._of_any_size().gather(captured)
        self._last = time.monotonic()
        if states is None:
            return
        self._look_for_metric(progress)
        info = CheckpointInfo(
            step=progress.step,
            epoch=progress.epoch,
            history=list(progress.history),
            data_fingerprint=self._spec.train.fingerprint,
            variables=self._variables.describe(),
            engine=self._spec.engine,
            epoch_step=progress.epoch_step,
            world=len(states),
            run_id=self._spec.run_id,
            order=self._spec.order,
            settings=self._spec.settings,
            state=state,
            rank_states=[rank_state.values for rank_state in states],
            model={**self._described, "trained_by": self._variables.trained_by()},
        )
        self._writer.wait()  # until the snapshot taken before is written
        self._snapshot = self._variables.capture(self._snapshot)
        files = {VARIABLES_FILE: self._snapshot, RANKS_FILE: join_states(states)}
        self._writer.submit(info, files, tuple(accounts), then)

    def check_metric(self, logs: dict[str, float]) -> None:
        """Check, after a first step, that there will be a metric to tell the best by.

        Raises:
            InvalidInputError: there will not.
        """
        if self._metric_known:
            return
        names = sorted(logs)
        if self._spec.validation is not None:
            names += [f"val_{name}" for name in names]
        if self._options.best_metric not in names:
            raise InvalidInputError(
                f"best_metric={self._options.best_metric!r} is no metric of this training; it has "
                + ", ".join(names)
            )
        self._metric_known = True

    def _look_for_metric(self, progress: Progress) -> None:
        """Tell, after the first epoch that has all results, if none is the one asked for.

        Here are the results that are not known after a first step: those of a model's own steps,
        and what callbacks add, perhaps not to every epoch.
        """
        validates = self._spec.validation is None or self._spec.fit.validates(progress.epoch - 1)
        if self._metric_known or progress.epoch_step or not progress.history or not validates:
            return
        self._metric_known = True
        results = progress.history[-1]
        if self._options.best_metric not in results:
            notify(
                f"best_metric={self._options.best_metric!r} is no result of epoch "
                f"{progress.epoch}, which has {', '.join(sorted(results))}; only a checkpoint of "
                "an epoch that has it is kept as the best"
            )

    def poll(self) -> None:
        """Raise what went wrong in writing, if anything did."""
        self._writer.poll()

    def finish(self) -> None:
        """Wait until all that was taken is written."""
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()
