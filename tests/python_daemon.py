"""Spark's daemon of Python workers, with TensorFlow imported before it forks them.

A worker ends with the task that fails in it, and each new one imports TensorFlow for itself, 3 s of
CPU hundreds of times in the tests. Their session has workers forked from a process that has done
so, as the product forks ranks from its ready processes; nothing else about them is different.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal

from pyspark.daemon import manager

from horovod_spark_runner.quiet import quiet_imports

_PR_SET_PDEATHSIG = 1
# In a worker and all that it forks: itself.
_workers: list[int] = []


def main() -> None:
    """Serve Spark as its own daemon does."""
    with quiet_imports():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401
    # Workers look for garbage after every task; what is imported is none.
    gc.collect()
    gc.freeze()
    os.register_at_fork(after_in_child=functools.partial(_end_with, os.getpid()))
    manager()


def _end_with(daemon: int) -> None:
    """Let a worker end with its daemon, from its first moment on.

    Spark ends a daemon that a cancelled task was asking for a worker, and to fork a large process
    takes a while: the daemon's last signal would find the worker still ignoring it.
    """
    if _workers:
        return  # a process that a worker has forked
    _workers.append(os.getpid())
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != daemon:
        os._exit(1)


if __name__ == "__main__":
    main()
