"""Commit of files into a folder, as Spark commits a job's.

Tasks write into a temporary folder of the destination. At the end the driver moves the files of one
attempt per task into place and writes ``_SUCCESS``. A lease keeps other calls out meanwhile.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..errors import InvalidInputError
from ..storage.filesystem import Location
from ..storage.lease import Lease, Terms

# Threads that wait for storage on the driver.
THREADS = 16
_TEMPORARY = "_temporary-"
_OF_A_CALL = re.compile(rf"{_TEMPORARY}[0-9a-f]{{32}}")
_LEASE = "_lease.json"
# The local file that is locked while the lease changes hands. It stays.
_GUARD = "._lease"
_SUCCESS = "_SUCCESS"


@dataclass
class Commit:
    """Files to be committed.

    Attributes:
        staging: the folder that tasks write into.
        files: for each file of the destination, its name in ``staging``.
    """

    staging: Location
    files: dict[str, str] = field(default_factory=dict)


def check_destination(destination: Location, mode: str) -> None:
    """Check that a folder may be written.

    Args:
        destination: the folder.
        mode: ``"error"`` refuses a folder that is not empty.

    Raises:
        InvalidInputError: it is a file, not empty, or cannot be read.
    """
    with _failures_named(destination):
        if destination.stat() is not None:
            raise InvalidInputError(f"the destination {destination} is a file; name a folder")
        if mode != "error" or not _contents(destination):
            return
        partial = "" if destination.join(_SUCCESS).exists() else " and has no _SUCCESS"
        raise InvalidInputError(
            f"the destination {destination} is not empty{partial}; name another folder, or "
            "mode='overwrite' to replace its files"
        )


@contextlib.contextmanager
def committing(destination: Location, mode: str) -> Iterator[Commit]:
    """Lease a destination, yield a folder to fill, and move its files into place at the end.

    Args:
        destination: the folder to write.
        mode: ``"error"`` refuses a folder that is not empty, ``"overwrite"`` replaces its files.

    Raises:
        InvalidInputError: the destination cannot be written, another call is writing it, or it is
            not to be overwritten.
    """
    terms = Terms(
        resource=f"the destination {destination}",
        holder="call of predict_files",
        instead="name another folder",
        refused=InvalidInputError,
        failed=InvalidInputError,
    )
    with _failures_named(destination):
        destination.make_folder()
    with Lease(destination.join(_LEASE), destination.join(_GUARD), terms) as lease:
        # Another call may have ended since the plan was made.
        check_destination(destination, mode)
        commit = Commit(destination.join(_TEMPORARY + lease.token))
        with _failures_named(destination):
            for place in destination.list():
                if _OF_A_CALL.fullmatch(place.name):  # of a call that was killed
                    place.delete_folder()
            commit.staging.make_folder()
        try:
            yield commit
            check_destination(destination, mode)
            with _failures_named(destination):
                lease.check()
                if mode == "overwrite":
                    _delete_contents(destination)
                _move_into_place(destination, commit)
                lease.check()
                destination.join(_SUCCESS).write_bytes(b"")
        finally:
            with contextlib.suppress(OSError):
                commit.staging.delete_folder()


@contextlib.contextmanager
def _failures_named(destination: Location) -> Iterator[None]:
    """Name the destination where storage fails."""
    try:
        yield
    except OSError as error:
        message = f"the destination {destination} cannot be written: {error}"
        raise InvalidInputError(message) from error


def _contents(destination: Location) -> list[Location]:
    """Return the files and folders in a destination, without those of calls in progress."""
    return [
        place
        for place in destination.list()
        if not place.name.startswith((_LEASE, _GUARD)) and not _OF_A_CALL.fullmatch(place.name)
    ]


def _delete_contents(destination: Location) -> None:
    # A destination with a part of the files must have no _SUCCESS.
    for place in sorted(_contents(destination), key=lambda place: place.name != _SUCCESS):
        if place.is_folder:
            place.delete_folder()
        else:
            place.delete_file()


def _move_into_place(destination: Location, commit: Commit) -> None:
    if destination.has_atomic_rename:  # object stores have no folders
        for name in sorted({target.rpartition("/")[0] for target in commit.files} - {""}):
            destination.join(name).make_folder()

    def move(target: str) -> None:
        commit.staging.join(commit.files[target]).move_to(destination.join(target))

    with ThreadPoolExecutor(THREADS, "hsr-commit") as pool:
        list(pool.map(move, commit.files))
