"""Replace whole folders atomically."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator

from ..errors import RunDirectoryError, StorageError
from .filesystem import Location

logger = logging.getLogger(__name__)


def check_free(target: Location, mode: str, mark: str, kind: str) -> None:
    """Check that a folder may be written.

    Args:
        target: the folder.
        mode: ``"error"`` refuses any existing one, ``"overwrite"`` only one of another kind.
        mark: a file that identifies its kind.
        kind: kind of folder, for messages.

    Raises:
        RunDirectoryError: it may not be.
    """
    if not target.exists() or (target.is_folder and not target.list()):
        return
    if mode == "error":
        raise RunDirectoryError(
            f"{target} exists already; mode='overwrite' replaces an earlier export"
        )
    if not target.join(mark).exists():
        raise RunDirectoryError(
            f"{target} holds something other than {kind}, which is not replaced; give another path"
        )


@contextlib.contextmanager
def convert_save_errors(kind: str, target: Location) -> Iterator[None]:
    """Name what could not be written where, if storage fails inside.

    Args:
        kind: kind of file or folder, for messages.
        target: its location.

    Raises:
        StorageError: storage fails.
    """
    try:
        yield
    except OSError as error:
        left = (
            "what was there before, if anything, is untouched"
            if target.has_atomic_rename
            else "what is there now may be incomplete, and is then refused when it is read"
        )
        raise StorageError(f"{kind} could not be written to {target}: {error}; {left}") from error


def check_free_file(target: Location, mode: str) -> None:
    """Check that a file may be written.

    Args:
        target: the file.
        mode: ``"error"`` refuses an existing file, ``"overwrite"`` only a folder.

    Raises:
        RunDirectoryError: it may not be.
    """
    if not target.exists():
        return
    if mode == "error":
        raise RunDirectoryError(
            f"{target} exists already; mode='overwrite' replaces an earlier export"
        )
    if target.is_folder:
        raise RunDirectoryError(f"{target} is a folder, which no file replaces; give another path")


def write_aside(target: Location, write: Callable[[Location], object]) -> None:
    """Write a folder beside its target, and move it there; only where storage can rename.

    Args:
        target: its location; it may exist, or be a link to another folder, which then stays a link.
        write: writes the files into the folder that it is called with.

    Raises:
        OSError: storage fails; ``target`` is unchanged.
    """
    target = target.resolve_links()
    aside = target.parent.join(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        write(aside)
        replace_folder(target, aside)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.delete_folder()
        raise


def replace_folder(location: Location, new: Location) -> None:
    """Move a folder to a location, and delete the folder that was there.

    On local storage the two are exchanged in one step, where kernel and file system support it;
    elsewhere there is none for a moment.

    Args:
        location: the target.
        new: the folder, beside it.

    Raises:
        OSError: it cannot be moved; ``location`` is restored.
    """
    if location.exists() and new.exchange_with(location):
        delete_quietly(new)
        return
    old = new.parent.join(f"{new.name}.old")
    replaced = location.exists()
    if replaced:
        location.move_to(old)
    try:
        new.move_to(location)
    except BaseException:
        if replaced:
            old.move_to(location)
        raise
    if replaced:
        delete_quietly(old)


def delete_quietly(folder: Location) -> None:
    """Delete a folder that is no longer used; warn if that fails."""
    try:
        folder.delete_folder()
    except OSError as error:
        logger.warning("%s could not be deleted: %s", folder, error)


def make_parent(file: Location) -> None:
    """Make the folder of a local file; elsewhere folders come with their files."""
    if file.is_local:
        file.parent.make_folder()
