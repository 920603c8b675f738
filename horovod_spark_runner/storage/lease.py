"""The lock that keeps two runs from writing one run directory.

``lock.json`` names its holder (host, process), who writes it anew every few seconds. It is stale
once its process is known to be dead, or is this one and no run in it holds the lock any more. Where
that cannot be known, because it is of another machine or container, it is once it has not changed
while one watched it for a minute: clocks of two hosts may differ by more than that. Whoever reads
and then writes it holds the file system's lock of another file meanwhile; where there is none, as
on object stores, it is read back after a moment. And every checkpoint's writer looks whether the
lock is still its run's own (`check_held`), which keeps out a run whose lock was taken while it
seemed dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from enum import Enum
from types import TracebackType
from typing import IO, Any

from ..errors import CheckpointError, RunDirectoryError
from ..machine import boot_id, process_start
from ..storage.filesystem import Location, open_no_link
from ..storage.patience import HungError, answered
from ..typed_json import load_json
from .directory import RunDirectory

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0
# How often the lock of another machine is looked at meanwhile.
WATCH_SECONDS = 1.0
# How long another writer's lock may take to become visible on an object store.
SETTLE_SECONDS = 1.0
# Tokens of the locks that runs of this process hold, or are about to.
_live: set[str] = set()


class Holder(Enum):
    """What can be told at once of the process that holds a lock."""

    ALIVE = "alive"
    GONE = "gone"
    ELSEWHERE = "on another machine, or in another container"


class RunLock:
    """Holds a run directory for one writer; use as a context manager.

    Args:
        directory: the run directory.

    Raises:
        RunDirectoryError: on entry, if another run holds it.
        CheckpointError: on entry, if the storage fails.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._place = directory.lock
        self.token = uuid.uuid4().hex
        # All that were written, or may have been where storage failed, or may be yet.
        self._tokens: set[str] = set()
        self._ended = threading.Event()
        self._guard = threading.Lock()  # token and file change together
        self._renewing = threading.Thread(target=self._renew, name="hsr-lock", daemon=True)

    def __enter__(self) -> RunLock:
        try:
            self._take()
        except OSError as error:
            self._give_up(delete=not isinstance(error, HungError))
            raise CheckpointError(f"{self._place} cannot be written: {error}") from error
        except BaseException:
            self._give_up(delete=bool(self._tokens))
            raise
        self._renewing.start()
        return self

    def _take(self) -> None:
        """Take the lock, as soon as it is known to be free or stale."""
        watch = Watch()
        if self._taken(watch):
            return
        logger.warning(
            "%s is of another machine or container; whether its run lives shows in at most %.0f s",
            self._place,
            STALE_SECONDS,
        )
        while not self._taken(watch):
            time.sleep(WATCH_SECONDS)

    def _taken(self, watch: Watch) -> bool:
        """Take the lock if it is free or stale; return whether that could be told already.

        Raises:
            RunDirectoryError: another run holds it.
        """
        with _alone(self._directory) as alone:
            found = read_lock(self._place)
            if found is not None:
                reason = self._why_stale(found, watch)
                if reason is None:
                    return False
                logger.warning("%s is stale (%s) and is taken over", self._place, reason)
            self._write(self.token)
            if alone:
                self._directory.sweep_locks()
        if not alone:
            self._confirm()
        return True

    def _why_stale(self, found: dict[str, Any], watch: Watch) -> str | None:
        """Return why the lock may be taken over; ``None`` if only time will tell."""
        if not found:
            return "it is damaged"
        holder = holder_of(found)
        if holder is Holder.GONE:
            return f"process {found.get('pid')} on this machine is gone"
        own = holder is Holder.ALIVE and found.get("pid") == os.getpid()
        if own and found.get("token") not in _live:
            return "it was left by a run of this process that has ended"
        same = watch.look(found) if holder is Holder.ELSEWHERE else None
        if same is None:
            raise RunDirectoryError(self._refusal(found))
        if same >= STALE_SECONDS:
            return f"{found.get('host')} has not renewed it for {STALE_SECONDS:.0f} s"
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._renewing.join()
        self._give_up(delete=True)

    def _give_up(self, *, delete: bool) -> None:
        """Hold the lock no more; if it cannot be deleted, it is stale."""
        try:
            if delete:
                with contextlib.suppress(OSError), _alone(self._directory):
                    if self._is_ours():
                        self._place.delete_file()
        finally:
            _live.difference_update(self._tokens)

    def _is_ours(self) -> bool:
        return (read_lock(self._place) or {}).get("token") in self._tokens

    def begin_attempt(self) -> str:
        """Return a new token; writers of an earlier attempt are shut out from now on.

        Raises:
            RunDirectoryError: another run has taken the lock.
            CheckpointError: the storage fails.
        """
        try:
            with self._guard, _alone(self._directory):
                if not self._is_ours():
                    check_held(self._directory, self.token)
                token = uuid.uuid4().hex
                self._write(token)
                self.token = token  # only now: a write that failed has taken nothing from us
        except OSError as error:
            raise CheckpointError(f"{self._place} cannot be renewed: {error}") from error
        return self.token

    def _write(self, token: str) -> None:
        self._tokens.add(token)
        _live.add(token)
        record = {"token": token, "renewed": time.time(), **identity()}
        self._place.write_text(json.dumps(record))

    def _confirm(self) -> None:
        time.sleep(SETTLE_SECONDS)
        found = read_lock(self._place) or {}
        if found.get("token") != self.token:
            raise RunDirectoryError(self._refusal(found))

    def _refusal(self, found: dict[str, Any]) -> str:
        return (
            f"run_dir {self._directory.location} is being written by another run (process "
            f"{found.get('pid')} on {found.get('host')}). Wait for it, give another run_dir, or "
            f"delete {self._place} if that run is surely dead"
        )

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                with self._guard, _alone(self._directory):
                    # Never over another's: a run thought dead must not take the lock back.
                    if not self._is_ours():
                        logger.warning("%s was taken over by another run", self._place)
                        return
                    self._write(self.token)
            except OSError as error:
                logger.warning("%s could not be renewed: %s", self._place, error)


class Watch:
    """A look at the lock of a holder elsewhere, for as long as it takes: is it renewed?"""

    def __init__(self) -> None:
        self._first: dict[str, Any] | None = None
        self._began = 0.0

    def look(self, found: dict[str, Any]) -> float | None:
        """Return for how many seconds the lock has been the same; ``None`` if it has changed."""
        if self._first is None:
            self._first, self._began = found, time.monotonic()
        return time.monotonic() - self._began if found == self._first else None


@contextlib.contextmanager
def _alone(directory: RunDirectory) -> Iterator[bool]:
    """Keep others from doing the same at the same time; yields whether that was possible.

    The file is a file of its own that stays: NFS locks only what is open for writing, which no
    folder can be, and a file that is replaced or removed is not the one another host has locked.
    """
    if not directory.location.is_local:
        yield False
        return
    file: IO[str] | None = None
    # Some mounted object stores know no locks; then it is as in any object store.
    with contextlib.suppress(OSError):
        file = answered(lambda headway: _open_locked(str(directory.guard)), str(directory.guard))
    try:
        yield file is not None
    finally:
        if file is not None:
            file.close()


def _open_locked(path: str) -> IO[str]:
    file = open(path, "a", opener=open_no_link)  # noqa: SIM115 - closed by whom it is given to
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except BaseException:
        file.close()
        raise
    return file


def read_lock(place: Location) -> dict[str, Any] | None:
    """Return the contents of a lock; empty if it is damaged, ``None`` if there is none."""
    try:
        found = load_json(place.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    numbers = {"pid": int, "renewed": (int, float)}
    whole = isinstance(found, dict) and all(
        isinstance(found.get(name, 0), kind)  # type: ignore[arg-type]
        for name, kind in numbers.items()
    )
    return found if whole else {}


def holds(directory: RunDirectory, token: str) -> bool:
    """Tell whether the run directory's lock is the one of ``token``."""
    return (read_lock(directory.lock) or {}).get("token") == token


def check_held(directory: RunDirectory, token: str) -> None:
    """Check that the run directory's lock is still the one of ``token``.

    Raises:
        RunDirectoryError: another run has it, or it is damaged.
        InvalidInputError: nothing leads from this process to the storage.
        OSError: it cannot be read; the storage may be away.
    """
    found = read_lock(directory.lock)
    if found is None:
        raise FileNotFoundError(f"{directory.lock} is gone")
    if not found:
        raise RunDirectoryError(f"{directory.lock} is damaged; this run writes no more")
    if found.get("token") != token:
        raise RunDirectoryError(
            f"run_dir {directory.location} was taken over by another run; this one writes no more"
        )


def holder_of(found: dict[str, Any]) -> Holder:
    """Return what can be told at once of a lock's holder; of a damaged lock, that it is gone."""
    own = identity()
    if not found:
        return Holder.GONE
    if any(found.get(name) != own[name] for name in ("host", "boot", "pids")):
        return Holder.ELSEWHERE
    gone = process_start(int(found.get("pid", 0))) != found.get("started")
    return Holder.GONE if gone else Holder.ALIVE


def seems_held(found: dict[str, Any], now: float) -> bool:
    """Tell whether a lock's holder seems to live; good enough to be shown, not to take it over.

    Args:
        found: the lock.
        now: seconds since 1970, by this machine's clock; the other's may differ.
    """
    holder = holder_of(found)
    if holder is Holder.ELSEWHERE:
        return now - float(found.get("renewed", 0.0)) <= STALE_SECONDS
    return holder is Holder.ALIVE


def identity() -> dict[str, Any]:
    """Return what tells this process from all others, also from a later one of the same number."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pids": os.readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
    }
