"""The lock that keeps two runs from writing one run directory.

``lock.json`` names its holder (host, process) and carries a time that the holder renews. It is
stale once its process is known to be dead or, seen from another machine, once it has not been
renewed for a minute. Whoever reads and then writes it holds a lock of the file system meanwhile;
object stores have none, so there it is read back after a moment. And every checkpoint's writer
looks whether the lock is still its run's own (`check_held`), which keeps out a run whose lock was
taken while it seemed dead.
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
from types import TracebackType
from typing import Any

from ..errors import CheckpointError, RunDirectoryError
from ..machine import boot_id, process_start
from .filesystem import Location
from .run_directory import RunDirectory

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0
# How long another writer's lock may take to become visible on an object store.
SETTLE_SECONDS = 1.0


class RunLock:
    """Holds a run directory for one writer; use as a context manager.

    Args:
        directory: the run directory.

    Raises:
        RunDirectoryError: on entry, if another run holds it.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._place = directory.lock
        self.token = uuid.uuid4().hex
        self._ended = threading.Event()
        self._guard = threading.Lock()  # token and file change together
        self._renewing = threading.Thread(target=self._renew, name="hsr-lock", daemon=True)

    def __enter__(self) -> RunLock:
        with _alone(self._directory):
            found = read_lock(self._place)
            if found is not None:
                reason = why_stale(found, time.time())
                if reason is None:
                    raise RunDirectoryError(self._refusal(found))
                logger.warning("%s is stale (%s) and is taken over", self._place, reason)
            self._place.write_text(self._record())
        if not self._place.is_local:
            self._confirm()
        self._renewing.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._renewing.join()
        with contextlib.suppress(OSError), _alone(self._directory):
            if holds(self._directory, self.token):
                self._place.delete_file()

    def begin_attempt(self) -> str:
        """Return a new token; writers of an earlier attempt are shut out from now on.

        Raises:
            RunDirectoryError: another run has taken the lock.
            CheckpointError: the storage fails.
        """
        try:
            with self._guard, _alone(self._directory):
                check_held(self._directory, self.token)
                self.token = uuid.uuid4().hex
                self._place.write_text(self._record())
        except OSError as error:
            raise CheckpointError(f"{self._place} cannot be renewed: {error}") from error
        return self.token

    def _record(self) -> str:
        return json.dumps({"token": self.token, "renewed": time.time(), **_identity()})

    def _confirm(self) -> None:
        time.sleep(SETTLE_SECONDS)
        found = read_lock(self._place) or {}
        if found.get("token") != self.token:
            raise RunDirectoryError(self._refusal(found))

    def _refusal(self, found: dict[str, Any]) -> str:
        age = time.time() - float(found.get("renewed", 0.0))
        return (
            f"run_dir {self._directory.location} is being written by another run (process "
            f"{found.get('pid')} on {found.get('host')}, last seen {age:.0f} s ago). Wait for it, "
            f"give another run_dir, or delete {self._place} if that run is surely dead"
        )

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                with self._guard, _alone(self._directory):
                    # Never over another's: a run thought dead must not take the lock back.
                    if not holds(self._directory, self.token):
                        logger.warning("%s was taken over by another run", self._place)
                        return
                    self._place.write_text(self._record())
            except OSError as error:
                logger.warning("%s could not be renewed: %s", self._place, error)


@contextlib.contextmanager
def _alone(directory: RunDirectory) -> Iterator[None]:
    """Keep others on local storage from doing the same at the same time."""
    if not directory.location.is_local:
        yield
        return
    descriptor = os.open(str(directory.location), os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some mounted object stores know no locks; then it is as in any object store.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_lock(place: Location) -> dict[str, Any] | None:
    """Return the contents of a lock; empty if unreadable, ``None`` if there is none."""
    try:
        found = json.loads(place.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def holds(directory: RunDirectory, token: str) -> bool:
    """Tell whether the run directory's lock is the one of ``token``."""
    return (read_lock(directory.lock) or {}).get("token") == token


def check_held(directory: RunDirectory, token: str) -> None:
    """Check that the run directory's lock is still the one of ``token``.

    Raises:
        RunDirectoryError: another run has it.
        OSError: it cannot be read; the storage may be away.
    """
    found = read_lock(directory.lock)
    if found is None:
        raise FileNotFoundError(f"{directory.lock} is gone")
    if found.get("token") != token:
        raise RunDirectoryError(
            f"run_dir {directory.location} was taken over by another run; this one writes no more"
        )


def why_stale(found: dict[str, Any], now: float) -> str | None:
    """Return why the lock's holder must be dead, or ``None`` if it may be alive."""
    own = _identity()
    if all(found.get(name) == own[name] for name in ("host", "boot", "pids")):
        pid = int(found.get("pid", 0))
        if process_start(pid) != found.get("started"):
            return f"process {pid} on this machine is gone"
        return None
    age = now - float(found.get("renewed", 0.0))
    if age > STALE_SECONDS:
        return f"it was last renewed {age:.0f} s ago on {found.get('host')}"
    return None


def _identity() -> dict[str, Any]:
    """Return what tells this process from all others, also from a later one of the same number."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pids": os.readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
    }
