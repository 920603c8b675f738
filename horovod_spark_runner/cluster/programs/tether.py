"""Replace this process by a command that dies with its parent.

Run as ``python -S -E tether.py PARENT_PID COMMAND [ARG ...]``. The death signal set here
survives ``exec``, so even a program we do not own (mpirun) cannot outlive the Spark task that
started it, whichever way the task ends. Standard library only, and little of it: this is on the
way of every start.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command, which the kernel ends with the parent."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
