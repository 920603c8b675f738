"""Lease file: keeps a place in storage for one writer at a time.

The file names its holder (host, boot, process) and is renewed every few seconds. A lease is stale
if its process is dead, or is this one and holds it no more. The holder on another machine, or in
another container, cannot be queried: its lease is stale if it has not changed for a minute of
watching, as the clocks of two hosts may differ by more than that. Local writers take turns by
`flock` of a guard file; on object stores, which have no locks, a new lease is read back after a
moment. A holder that was taken for dead is shut out by its token, see `check_held`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import IO

from ..errors import HorovodSparkError
from ..machine import boot_id, process_start
from ..typed_json import JsonObject, load_json
from .contents import MAX_TEXT_BYTES
from .filesystem import Location, open_no_link
from .retries import HungError, call_with_timeout

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0
# Interval at which a lease of another machine is polled.
WATCH_SECONDS = 1.0
# Time another writer's lease may take to become visible on an object store.
SETTLE_SECONDS = 1.0
# Tokens of the leases that this process holds or is about to take.
_live: set[str] = set()


class _Holder(Enum):
    """State of a lease's holder, as far as this process can find out at once."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "on another machine, or in another container"


@dataclass(frozen=True)
class Terms:
    """Words and exceptions of one kind of lease.

    Attributes:
        resource: the leased place, as messages name it.
        holder: kind of its holders, as messages name it.
        instead: alternative to waiting for the holder.
        refused: exception for a lease that another holder has.
        failed: exception for storage that fails.
    """

    resource: str
    holder: str
    instead: str
    refused: type[HorovodSparkError]
    failed: type[HorovodSparkError]


class Lease:
    """Lease of a place in storage for one writer; use as a context manager.

    Args:
        file: the lease file.
        guard: file that is locked while the lease file changes hands, if it is local. It is never
            deleted: another host may have locked the deleted one.
        terms: words and exceptions.

    Attributes:
        token: identity of the current attempt.

    Raises:
        HorovodSparkError: on entry, of the classes that ``terms`` names.
    """

    def __init__(self, file: Location, guard: Location, terms: Terms) -> None:
        self._file = file
        self._guard_file = guard
        self._terms = terms
        self.token = uuid.uuid4().hex
        # Tokens that were written, or may have been when storage failed.
        self._tokens: set[str] = set()
        self._ended = threading.Event()
        self._guard = threading.Lock()  # token and file change together
        self._renewing = threading.Thread(target=self._renew, name="hsr-lease", daemon=True)

    def __enter__(self) -> Lease:
        try:
            self._take()
        except OSError as error:
            self._release(delete=not isinstance(error, HungError))
            raise self._terms.failed(f"{self._file} cannot be written: {error}") from error
        except BaseException:
            self._release(delete=bool(self._tokens))
            raise
        self._renewing.start()
        return self

    def _take(self) -> None:
        """Take the lease once it is known to be free or stale."""
        watch = _Watch()
        if self._try_to_take(watch):
            return
        logger.warning(
            "%s is of another machine or container; whether its %s is alive shows within %.0f s",
            self._file,
            self._terms.holder,
            STALE_SECONDS,
        )
        while not self._try_to_take(watch):
            time.sleep(WATCH_SECONDS)

    def _try_to_take(self, watch: _Watch) -> bool:
        """Take the lease if it is free or stale; return whether that is known yet."""
        with self._exclusive() as exclusive:
            record = read_lease(self._file)
            if record is not None:
                reason = self._why_stale(record, watch)
                if reason is None:
                    return False
                logger.warning("%s is stale (%s) and is taken over", self._file, reason)
            self._write(self.token)
            if exclusive:
                self._sweep()
        if not exclusive:
            time.sleep(SETTLE_SECONDS)
            record = read_lease(self._file) or {}
            if record.get("token") != self.token:
                raise self._refusal(record)
        return True

    def _why_stale(self, record: JsonObject, watch: _Watch) -> str | None:
        """Return why the lease may be taken over; ``None`` while that is unknown."""
        if not record:
            return "it is damaged"
        holder = _holder_of(record)
        if holder is _Holder.DEAD:
            return f"process {record.get('pid')} on this machine is gone"
        is_this_process = holder is _Holder.ALIVE and record.get("pid") == os.getpid()
        if is_this_process and record.get("token") not in _live:
            return f"it was left by a {self._terms.holder} of this process that has ended"
        same = watch.look(record) if holder is _Holder.ELSEWHERE else None
        if same is None:
            raise self._refusal(record)
        if same >= STALE_SECONDS:
            return f"{record.get('host')} has not renewed it for {STALE_SECONDS:.0f} s"
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._renewing.join()
        self._release(delete=True)

    def _release(self, *, delete: bool) -> None:
        """Give up the lease; a file that cannot be deleted is stale from now on."""
        try:
            if delete:
                with contextlib.suppress(OSError), self._exclusive():
                    if self._is_held():
                        self._file.delete_file()
        finally:
            _live.difference_update(self._tokens)

    def _is_held(self) -> bool:
        return (read_lease(self._file) or {}).get("token") in self._tokens

    def begin_attempt(self) -> str:
        """Return a new token; writers with an earlier one are shut out from now on.

        Raises:
            HorovodSparkError: another holder has taken the lease, or the storage fails.
        """
        try:
            with self._guard, self._exclusive():
                if not self._is_held():
                    self.check()
                token = uuid.uuid4().hex
                self._write(token)
                self.token = token  # only now: a write that failed has changed nothing
        except OSError as error:
            raise self._terms.failed(f"{self._file} cannot be renewed: {error}") from error
        return self.token

    def check(self) -> None:
        """Check that the lease is still held; see `check_held`."""
        check_held(self._file, self.token, self._terms)

    def _write(self, token: str) -> None:
        self._tokens.add(token)
        _live.add(token)
        record = {"token": token, "renewed": time.time(), **identity()}
        self._file.write_text(json.dumps(record))

    def _refusal(self, record: JsonObject) -> HorovodSparkError:
        terms = self._terms
        return terms.refused(
            f"{terms.resource} is being written by another {terms.holder} (process "
            f"{record.get('pid')} on {record.get('host')}). Wait for it, {terms.instead}, or "
            f"delete {self._file} if that {terms.holder} is surely dead"
        )

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                with self._guard, self._exclusive():
                    # Never overwrite another's lease: a holder declared dead must not take it back.
                    if not self._is_held():
                        logger.warning(
                            "%s is gone, or of another %s", self._file, self._terms.holder
                        )
                        return
                    self._write(self.token)
            except OSError as error:
                logger.warning("%s could not be renewed: %s", self._file, error)

    def _sweep(self) -> None:
        """Delete files that killed writers of the lease file have left."""
        aside = re.compile(re.escape(f".{self._file.name}.") + "[0-9a-f]{8}")
        with contextlib.suppress(OSError):
            for place in self._file.parent.list():
                if aside.fullmatch(place.name):
                    place.delete_file()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Keep other writers out of the lease file; yield whether that was possible.

        The guard is a separate file: NFS locks only files open for writing, and the lease file is
        replaced whenever it is written.
        """
        file: IO[str] | None = None
        if self._guard_file.is_local:
            path = str(self._guard_file)
            # Some mounted object stores have no locks; they are treated as object stores.
            with contextlib.suppress(OSError):
                file = call_with_timeout(lambda watchdog: _open_locked(path), path)
        try:
            yield file is not None
        finally:
            if file is not None:
                file.close()


class _Watch:
    """Stopwatch of a lease that does not change."""

    def __init__(self) -> None:
        self._first: JsonObject | None = None
        self._began = 0.0

    def look(self, record: JsonObject) -> float | None:
        """Return the seconds for which the lease has been the same; ``None`` if it changed."""
        if self._first is None:
            self._first, self._began = record, time.monotonic()
        return time.monotonic() - self._began if record == self._first else None


def _open_locked(path: str) -> IO[str]:
    file = open(path, "a", opener=open_no_link)  # noqa: SIM115 - closed by the caller
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except BaseException:
        file.close()
        raise
    return file


def read_lease(file: Location) -> JsonObject | None:
    """Return the contents of a lease file; empty if it is damaged, ``None`` if there is none.

    Raises:
        InvalidInputError: this process cannot reach the storage.
    """
    try:
        content = file.read_bytes(MAX_TEXT_BYTES)
    except FileNotFoundError:
        return None
    try:
        record = load_json(content)
    except ValueError:
        return {}
    numbers = {"pid": int, "renewed": (int, float)}
    whole = isinstance(record, dict) and all(
        isinstance(record.get(name, 0), kind)  # type: ignore[arg-type]
        for name, kind in numbers.items()
    )
    return record if whole else {}


def holds(file: Location, token: str) -> bool:
    """Return whether ``token`` holds the lease of a file."""
    return (read_lease(file) or {}).get("token") == token


def check_held(file: Location, token: str, terms: Terms) -> None:
    """Check that a token still holds a lease.

    Args:
        file: the lease file.
        token: of the writer.
        terms: words and exceptions.

    Raises:
        HorovodSparkError: ``terms.refused``: another holder has it, or it is damaged.
        InvalidInputError: this process cannot reach the storage.
        OSError: it cannot be read; the storage may be away.
    """
    record = read_lease(file)
    if record is None:
        raise FileNotFoundError(f"{file} is gone")
    if not record:
        raise terms.refused(f"{file} is damaged; this {terms.holder} writes no more")
    if record.get("token") != token:
        raise terms.refused(
            f"{terms.resource} was taken over by another {terms.holder}; this one writes no more"
        )


def _holder_of(record: JsonObject) -> _Holder:
    """Return the state of a lease's holder; that of a damaged lease is dead."""
    this_process = identity()
    if not record:
        return _Holder.DEAD
    if any(record.get(name) != this_process[name] for name in ("host", "boot", "pids")):
        return _Holder.ELSEWHERE
    ended = process_start(int(record.get("pid", 0))) != record.get("started")
    return _Holder.DEAD if ended else _Holder.ALIVE


def seems_held(record: JsonObject, now: float) -> bool:
    """Return whether a lease's holder seems alive: good enough to show, not to take it over.

    Args:
        record: the lease.
        now: seconds since 1970, by this machine's clock; the holder's may differ.
    """
    holder = _holder_of(record)
    if holder is _Holder.ELSEWHERE:
        return now - float(record.get("renewed", 0.0)) <= STALE_SECONDS
    return holder is _Holder.ALIVE


def identity() -> JsonObject:
    """Return facts that identify this process among all, also later ones."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pids": os.readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
    }
