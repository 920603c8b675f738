"""Find the checkpoint that a run resumes from."""

from __future__ import annotations

import contextlib
import logging

from ..errors import HorovodSparkError, RunDirectoryError
from .config_diff import describe_rest
from .files import CheckpointInfo, newest_checkpoint, read_steps
from .run_directory import RunDirectory

logger = logging.getLogger(__name__)


def find_checkpoint(
    directory: RunDirectory, resume: str
) -> tuple[tuple[int, ...], CheckpointInfo | None]:
    """Return the steps of all checkpoints, and the one to resume from; warn of what is skipped.

    Args:
        directory: the run directory.
        resume: ``"auto"``, ``"never"`` or ``"required"``, see `run_training`.

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
    return steps, None if newest is None else newest[1]


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
