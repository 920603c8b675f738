"""A slot's private directory, and the process that clears up after the slot."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

_SWEEPER = str(Path(__file__).parent.parent / "programs" / "sweeper.py")
CLOSE_TIMEOUT = 10.0
_SHARED_MEMORY = Path("/dev/shm")
# Bytes of shared memory below which MPI may not start.
SMALL_MEMORY = 32 * 2**20


class Workspace:
    """A directory for one slot, readable by its user only.

    Its sweeper, a process of its own, removes it and kills the process groups named by `watch`
    when the slot closes the workspace or is killed.

    Args:
        run_id: the run's, whose slots on one host share a directory in shared memory.
    """

    def __init__(self, run_id: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="hsr-", dir=short_temporary(60)))
        self.shared_memory = _shared_memory(f"hsr-{run_id}")
        directories = [self.path, *filter(None, [self.shared_memory])]
        self._sweeper = subprocess.Popen(
            [sys.executable, "-S", "-E", _SWEEPER, *map(str, directories)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @staticmethod
    def shared_memory_left() -> int:
        """Return how many bytes shared memory has room for."""
        try:
            return shutil.disk_usage(_SHARED_MEMORY).free
        except OSError:
            return 0

    def folder(self, name: str) -> Path:
        """Return a new private folder inside."""
        path = self.path / name
        path.mkdir(mode=0o700)
        return path

    def watch(self, group: int) -> None:
        """Have a process group killed with the slot."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Have a group left alone that has ended: its number may come to name another one."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Clear up; safe to call again."""
        assert self._sweeper.stdin is not None
        with contextlib.suppress(OSError):
            self._sweeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._sweeper.wait(CLOSE_TIMEOUT)

    def _tell(self, line: str) -> None:
        assert self._sweeper.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._sweeper.stdin.write(line.encode())
            self._sweeper.stdin.flush()


def _shared_memory(name: str) -> Path | None:
    """Return a directory of this user's in shared memory, made by the first slot that wants it.

    MPI's segments lie there: those of ranks that were killed would stay for ever.
    """
    path = _SHARED_MEMORY / name
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return path if is_private(path) else None
    except OSError:
        return None


def is_private(path: Path) -> bool:
    """Tell whether ``path`` is a directory that this user alone can enter.

    Raises:
        OSError: there is nothing.
    """
    found = path.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return private and found.st_uid == os.getuid()


def short_temporary(below: int) -> str:
    """Return the temporary folder, or ``/tmp`` where it is too long for what lies in it.

    A Unix socket's path holds 107 bytes at most, and some clusters' temporary paths are long.

    Args:
        below: bytes that the folder's own path may have at most, and one.
    """
    base = tempfile.gettempdir()
    return base if len(base.encode()) < below else "/tmp"
