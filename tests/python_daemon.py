"""Spark's daemon of Python workers, with TensorFlow imported before it forks them.

A worker ends with the task that fails in it, and each new one imports TensorFlow for itself, 3 s of
CPU hundreds of times in the tests. Their session has workers forked from a process that has done
so, as the product forks ranks from its ready processes; nothing else about them is different.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

from horovod_spark_runner.quiet import quiet_imports


def main() -> None:
    """Serve Spark as its own daemon does."""
    with quiet_imports():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401
    # Workers look for garbage after every task; what is imported is none.
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
