"""A slot's private directory, and the process that cleans up after the slot.

If that process was killed, the slot does it, and if both were, the next slot on that host: each
directory names the slots that use it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...errors import EnvironmentProblem
from ...machine import process_start
from ..programs import sweeper
from ..protocol.processes import numbering

_SWEEPER = sweeper.__file__
_PREFIX = "hsr-"
# Files in a directory, one for each slot that uses it, which name its process.
_OWNER = "owner-"
CLOSE_TIMEOUT = 10.0
_SHARED_MEMORY = Path("/dev/shm")
# Bytes of shared memory, or of the temporary folder, below which MPI may not start.
_SMALL_MEMORY = 32 * 2**20


class Workspace:
    """A directory for one slot, readable by its user only.

    Its sweeper process removes it and kills the process groups named by `watch` when the slot
    closes the workspace or is killed.

    Args:
        run_id: the run's, whose slots on one host share a directory in shared memory.
    """

    def __init__(self, run_id: str) -> None:
        temporary = Path(short_temporary(60))
        for place in (temporary, _SHARED_MEMORY):
            _sweep(place)
        with _needing_room(temporary):
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary))
            _sign(self.path)
        try:
            with _needing_room(_SHARED_MEMORY):
                self.shared_memory = _shared_memory(f"{_PREFIX}{run_id}")
        except EnvironmentProblem:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._directories = [str(path) for path in (self.path, self.shared_memory) if path]
        self._groups: set[int] = set()
        self._sweeper = subprocess.Popen(
            [sys.executable, "-S", "-E", _SWEEPER, *self._directories],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @staticmethod
    def lacking_shared_memory() -> str:
        """Return a problem of shared memory that keeps MPI from starting; empty if none."""
        return _lacking(_SHARED_MEMORY)

    def lacking_room(self) -> str:
        """Return a problem of the slot's folder that keeps MPI from starting; empty if none."""
        return _lacking(self.path)

    def folder(self, name: str) -> Path:
        """Return a new private folder inside."""
        path = self.path / name
        path.mkdir(mode=0o700)
        return path

    def watch(self, group: int) -> None:
        """Have a process group killed with the slot."""
        self._groups.add(group)
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Stop watching a group that has ended: its number may be reused."""
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Clean up; safe to call again."""
        assert self._sweeper.stdin is not None
        with contextlib.suppress(OSError):
            self._sweeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._sweeper.wait(CLOSE_TIMEOUT)
        if self._sweeper.poll() != 0:  # it was killed, or stopped
            self._sweeper.kill()
            sweeper.clear(self._groups, self._directories)
            self._groups.clear()

    def _send(self, line: str) -> None:
        assert self._sweeper.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._sweeper.stdin.write(line.encode())
            self._sweeper.stdin.flush()


def _sign(directory: Path) -> None:
    """Record that this process uses a directory; on failure, remove it if no other one does.

    Raises:
        OSError: there is no room, for example.
    """
    pid = os.getpid()
    owner = directory / f"{_OWNER}{pid}"
    try:
        owner.write_text(f"{numbering()} {pid} {process_start(pid)}")
    except OSError:
        with contextlib.suppress(OSError):  # other slots use it
            owner.unlink(missing_ok=True)
            directory.rmdir()
        raise


@contextlib.contextmanager
def _needing_room(place: Path) -> Iterator[None]:
    """Raise an `EnvironmentProblem` if ``place`` has no room for files written inside."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EnvironmentProblem(
            f"{place} of host {socket.gethostname()} has no room for another file, which takes "
            f"bytes and an inode ({error.strerror}): remove files there, or make it larger"
        ) from error


def _sweep(place: Path) -> None:
    """Remove directories of this user's slots that were killed together with their sweeper."""
    for directory in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            owners = list(directory.glob(f"{_OWNER}*")) if is_private(directory) else []
            if owners and all(map(_has_ended, owners)):
                shutil.rmtree(directory, ignore_errors=True)


def _has_ended(owner: Path) -> bool:
    """Tell whether a directory's owner has ended; of another machine's owner, assume it has not."""
    try:
        where, pid, start = owner.read_text().split()
        return where == numbering() and process_start(int(pid)) != start
    except ValueError:  # it is just being written
        return False


def _shared_memory(name: str) -> Path | None:
    """Return this user's directory in shared memory for the run, created by its first slot.

    It holds MPI's segments: those of ranks that were killed would stay for ever.

    Raises:
        OSError: there is no room.
    """
    path = _SHARED_MEMORY / name
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not is_private(path):
            return None
        _sign(path)
        return path
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return None


def _lacking(place: Path) -> str:
    try:
        usage = os.statvfs(place)
    except OSError:
        return ""
    if usage.f_files and not usage.f_favail:
        return f"{place} has no inodes left: remove files there"
    room = usage.f_bavail * usage.f_frsize
    return f"{place} has {room / 2**20:.0f} MiB left" if room < _SMALL_MEMORY else ""


def is_private(path: Path) -> bool:
    """Tell whether ``path`` is a directory that this user alone can enter.

    Raises:
        OSError: it does not exist.
    """
    status = path.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return private and status.st_uid == os.getuid()


def short_temporary(below: int) -> str:
    """Return the temporary folder, or ``/tmp`` if its path is too long for sockets inside.

    A Unix socket's path holds 107 bytes at most, and some clusters' temporary paths are long.

    Args:
        below: the folder's path must have fewer bytes than this.
    """
    base = tempfile.gettempdir()
    return base if len(base.encode()) < below else "/tmp"
