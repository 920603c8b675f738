"""What a run must not leave behind.

Everything the tests start inherits two variables set in `conftest`: what others run on the
machine at the same time is none of ours.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK = "TEST_RUN_ID"
NAMES = ("launch.worker", "launch/shim.py", "launch/sweeper.py", "prterun", "prted", "mpirun")


def leftovers() -> list[str]:
    """Return the processes and directories of the tests' runs that are there now."""
    found = [str(path) for path in Path(os.environ["TMPDIR"]).glob("hsr-*")]
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                ours = mark in (entry / "environ").read_bytes()
            except (OSError, UnicodeDecodeError):
                continue
            if ours and any(name in command for name in NAMES):
                found.append(command)
    return found


def await_nothing_left(seconds: float = 10.0) -> None:
    """Fail if something is still there after a while."""
    deadline = time.monotonic() + seconds
    while left := leftovers():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
