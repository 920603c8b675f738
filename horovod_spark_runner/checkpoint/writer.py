"""Write checkpoints in a background thread, while the training continues."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..config.training import CheckpointOptions
from ..errors import CheckpointError
from ..storage.arrays import Arrays
from ..storage.retries import retry
from .files import CheckpointInfo, prune_checkpoints, save_checkpoint
from .run_directory import Account, RunDirectory

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes checkpoints of one run.

    Args:
        directory: the run directory.
        options: which to keep, and what happens after an error.
        token: the lease token that the run must hold.
        pause: how to wait; for tests.
    """

    def __init__(
        self,
        directory: RunDirectory,
        options: CheckpointOptions,
        token: str,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = directory
        self._options = options
        self._token = token
        self._pause = pause
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hsr-checkpoint")
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
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint in the background, after the one before.

        Args:
            info: all of it but its arrays.
            files: its arrays, by file; they must not change any more.
            accounts: see `RunDirectory.write_metrics`.
            then: called by the thread once it is written, or the training continues without it.

        Raises:
            CheckpointError: the one before could not be written, and ``on_error`` is ``raise``.
            RunDirectoryError: another run has taken the run directory over.
        """
        self.wait()
        self._pending = self._pool.submit(self._write_then, info, files, accounts, then)

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

    def _write_then(
        self,
        info: CheckpointInfo,
        files: Mapping[str, Arrays],
        accounts: Sequence[Account],
        then: Callable[[], None],
    ) -> None:
        try:
            self._write(info, files, accounts)
        except CheckpointError:
            if self._options.on_error == "raise":
                raise
            then()
            raise
        then()

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
        self._directory.check_held(self._token)
        save_checkpoint(self._directory, info, files)
        self._directory.write_metrics(info.history, accounts)
        prune_checkpoints(self._directory, info.step, self._options)
