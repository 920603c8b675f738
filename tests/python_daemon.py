"""Spark's daemon of Python workers, with what they use imported before it forks them.

A worker ends with the task that fails in it, and each new one imports frameworks for itself, 3 s of
CPU for TensorFlow and 1 s for the rest, hundreds of times in the tests. Their session has workers
forked from a process that has done so, as the product forks ranks from its prefork processes;
nothing else about them is different.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import signal

from pyspark.daemon import manager

from horovod_spark_runner.frameworks import quiet_imports

# None of these starts a thread, of which a forked worker would have none.
_OF_SLOTS = ("pyspark.worker", "horovod_spark_runner.cluster.slot.slot")
_OF_QUERIES = (
    *_OF_SLOTS,
    "tensorflow",
    "keras",
    "torch",
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "horovod_spark_runner.model.evaluate_task",
    "horovod_spark_runner.model.inference",
    "horovod_spark_runner.engines.keras.evaluate",
    "horovod_spark_runner.engines.torch.evaluate",
)
_PR_SET_PDEATHSIG = 1
# In a worker and all that it forks: itself.
_workers: list[int] = []


def main() -> None:
    """Serve Spark as its own daemon does."""
    # Spark sets this for queries only, whose workers have a daemon of their own by that.
    queries = "SPARK_SIMPLIFIED_TRACEBACK" in os.environ
    with quiet_imports():
        for module in _OF_QUERIES if queries else _OF_SLOTS:
            importlib.import_module(module)
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
