"""Which checkpoint of its directory a run goes on from."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from ..errors import HorovodSparkError, RunDirectoryError
from ..rundir.checkpoint import CheckpointInfo, newest_checkpoint, read_steps
from ..rundir.directory import RunDirectory
from ..training.changes import describe_rest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint to go on from, as the driver found it before it held the lock.

    Attributes:
        info: what it is; ``None`` to start anew.
        steps: those of all checkpoints there were. While they are the same, so is what was found.
    """

    info: CheckpointInfo | None
    steps: tuple[int, ...]


def find_checkpoint(directory: RunDirectory, resume: str) -> FoundCheckpoint:
    """Return the checkpoint to go on from; what is skipped is warned of.

    Raises:
        RunDirectoryError: ``resume`` forbids what is there, or nothing of it is whole.
        CheckpointError: the storage fails.
    """
    steps = read_steps(directory)
    skipped: list[str] = []
    newest = newest_checkpoint(directory, directory.run_id(), skipped.append)
    if newest is None:
        if resume == "required":
            raise RunDirectoryError(
                f"resume='required', but run_dir {directory.location} holds no checkpoint"
                + "".join(f"; {line}" for line in skipped)
            )
    elif resume == "never":
        raise RunDirectoryError(
            f"resume='never', but run_dir {directory.location} holds a run already "
            f"({newest[0].name}); give another run_dir, or resume='auto' to go on from it"
        )
    for line in skipped:
        logger.warning(line)
    return FoundCheckpoint(None if newest is None else newest[1], steps)


def describe_interruption(directory: RunDirectory, epochs: int) -> str:
    """Describe where an interrupted run of ``epochs`` stands, and how to resume it."""
    place = str(directory.location)
    newest = None
    with contextlib.suppress(HorovodSparkError, OSError):
        newest = newest_checkpoint(directory, directory.run_id(), logger.debug)
    if newest is None:
        return f"interrupted before a checkpoint was saved in {place}: the next call starts anew"
    folder, info = newest
    rest = describe_rest(info, epochs) or "no epoch is left"
    return (
        f"interrupted; {folder.name} is saved, {rest}: the same call with run_dir={place!r} resumes"
    )
