"""Clears up after one slot, however the slot ended.

Run as ``python -S -E sweeper.py DIRECTORY...`` with a pipe from the slot as standard input, on
which the slot names the process groups it starts (``+PID``) and those that have ended (``-PID``).
When the pipe closes, because the slot is done or was killed, what is left of the groups is killed
and the directories are removed. Standard library only.
"""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable


def main() -> None:
    """Wait for the slot's end, then remove what is left of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    clear(groups, sys.argv[1:])


def clear(groups: Iterable[int], directories: Iterable[str]) -> None:
    """Kill process groups and remove directories."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
