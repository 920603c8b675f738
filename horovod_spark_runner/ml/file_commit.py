"""A destination of files: who may write it, where tasks write first, and how it appears.

A folder that does not exist yet is written beside its place and renamed, where storage can rename
folders: it appears whole or not at all. A folder that exists keeps its owner and rights: files are
moved into it one by one, and ``_SUCCESS`` is written last.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import InvalidInputError
from ..rundir.lock import read_lock
from ..storage.filesystem import Location
from .file_claim import Claim, left_behind
from .file_task import FAILED

logger = logging.getLogger(__name__)

# Threads that wait for storage on the driver.
THREADS = 16
_STAGING = "_staging-"
_CLAIM = "_claim"
_SUCCESS = "_SUCCESS"
# In the staging folder: the destination as it will be.
_WHOLE = "_whole"


@dataclass
class Commit:
    """What is written for a destination.

    Attributes:
        staging: the folder that tasks write into.
        told: of each file: the number of its unit, its name in the staging folder, its rows.
    """

    staging: Location
    told: list[tuple[int, str, int]] = field(default_factory=list)

    def failure(self) -> str | None:
        """Return what a task has found wrong with the data, if one has."""
        with contextlib.suppress(OSError):
            for place in self.staging.list():
                if place.name.startswith(FAILED):
                    return place.read_text()
        return None


def check_destination(destination: Location, mode: str) -> None:
    """Check that a folder may be written.

    Args:
        destination: the folder.
        mode: ``"error"`` refuses one that holds something.

    Raises:
        InvalidInputError: it is a file, holds something, or cannot be read.
    """
    with _named(destination):
        if destination.stat() is not None:
            raise InvalidInputError(f"the destination {destination} is a file; name a folder")
        if mode != "error" or not _placed_in(destination):
            return
        claim = _claim_in(destination)
        left = read_lock(claim)
        if left is not None and left.get("moving") and left_behind(claim, destination) is not None:
            raise InvalidInputError(
                f"the destination {destination} holds a part of the files of an earlier call, "
                "which was ended while it moved them (there is no _SUCCESS); mode='overwrite' "
                "replaces them"
            )
        raise InvalidInputError(
            f"the destination {destination} is not empty; name another folder, or "
            "mode='overwrite' to replace what is there"
        )


@contextmanager
def _named(destination: Location) -> Iterator[None]:
    """Name the destination where the storage fails."""
    try:
        yield
    except OSError as error:
        message = f"the destination {destination} cannot be written: {error}"
        raise InvalidInputError(message) from error


@contextmanager
def committing(destination: Location, mode: str, targets: Sequence[str]) -> Iterator[Commit]:
    """Make room for what tasks write; at the end put what they told of in its places.

    Args:
        destination: the folder to write.
        mode: ``"error"`` removes nothing that is there, ``"overwrite"`` replaces it.
        targets: of each unit, the file to write.

    Raises:
        InvalidInputError: the destination cannot be written, is written by another call, or holds
            something that is not to be replaced.
    """
    with contextlib.ExitStack() as stack:
        with _named(destination):
            claimed = stack.enter_context(_claimed(destination))
            # Another call may have ended since the plan was made.
            check_destination(destination, mode)
            commit = Commit(claimed.staging)
            commit.staging.make_folder()
        stack.callback(commit.staging.delete_folder)
        yield commit
        with _named(destination):
            check_destination(destination, mode)
            claimed.claim.begin_moving()
        written = {targets[number]: name for number, name, _ in commit.told}
        if claimed.beside and not destination.exists():
            _appear(destination, commit.staging, written)
        else:
            claimed.moving = True
            if mode == "overwrite":
                _empty(destination)
            _put(destination, commit.staging, written)
            claimed.moving = False


@dataclass
class _Claimed:
    """A destination that is this call's.

    Attributes:
        claim: says so.
        beside: whether the destination does not exist, and can appear whole.
        staging: where tasks write.
        moving: whether the destination holds a part of the files.
    """

    claim: Claim
    beside: bool
    staging: Location
    moving: bool = False


@contextmanager
def _claimed(destination: Location) -> Iterator[_Claimed]:
    """Claim a destination, and remove what calls that are gone have left there."""
    beside = destination.renames_whole and not destination.exists()
    place = _claim_beside(destination) if beside else _claim_in(destination)
    if beside:
        place.parent.make_folder()
    claim = Claim(place, destination)
    claim.take()
    name = f"{_STAGING}{destination.name}-" if beside else _STAGING
    claimed = _Claimed(claim, beside, place.parent.join(name + claim.token))
    try:
        _clear(destination, beside=beside)
        yield claimed
    finally:
        claim.release(unfinished=claimed.moving)


def _clear(destination: Location, *, beside: bool) -> None:
    """Check that no other call has the destination, and remove what those gone have left.

    A call claims in the folder or beside it, by whether it exists, and looks at the other place
    then: of two that claim in both places at once, one at least sees the other.
    """
    stagings = [place for place in destination.list() if place.name.startswith(_STAGING)]
    if destination.renames_whole:
        other = _claim_in(destination) if beside else _claim_beside(destination)
        if left_behind(other, destination) is not None:
            other.delete_file()
        own = re.compile(re.escape(f"{_STAGING}{destination.name}-") + "[0-9a-f]{12}")
        with contextlib.suppress(PermissionError):  # the folder above may be another user's
            stagings += [place for place in destination.parent.list() if own.fullmatch(place.name)]
    for place in stagings:
        logger.warning("%s is of a call that was ended, and is removed", place)
        place.delete_folder()


def _claim_in(destination: Location) -> Location:
    return destination.join(f"{_CLAIM}.json")


def _claim_beside(destination: Location) -> Location:
    return destination.parent.join(f"{_CLAIM}-{destination.name}.json")


def _placed_in(place: Location) -> list[Location]:
    """Return what lies in a folder, without what calls keep there while they go on."""
    aside = (_STAGING, f"{_CLAIM}.json", f".{_CLAIM}.json.")
    return [found for found in place.list() if not found.name.startswith(aside)]


def _appear(destination: Location, staging: Location, written: Mapping[str, str]) -> None:
    """Let a destination that does not exist appear whole."""
    whole = staging.join(_WHOLE)
    whole.make_folder()
    _put(whole, staging, written)
    try:
        whole.move_to(destination)
    except OSError as error:
        raise InvalidInputError(
            f"the destination {destination} cannot be made, or was made meanwhile; nothing was "
            f"written there: {error}"
        ) from error


def _empty(destination: Location) -> None:
    # What says that all is there goes first.
    for place in sorted(_placed_in(destination), key=lambda place: place.name != _SUCCESS):
        if place.is_folder:
            place.delete_folder()
        else:
            place.delete_file()


def _put(folder: Location, staging: Location, written: Mapping[str, str]) -> None:
    """Move files into a folder, and say at last that all are there."""
    if folder.renames_whole:  # object stores have no folders
        for name in sorted({target.rpartition("/")[0] for target in written} - {""}):
            folder.join(name).make_folder()

    def move(target: str) -> None:
        staging.join(written[target]).move_to(folder.join(target))

    with ThreadPoolExecutor(THREADS, "hsr-commit") as pool:
        list(pool.map(move, written))
    folder.join(_SUCCESS).write_bytes(b"")
