"""HorovodRunner with one allreduce."""

from __future__ import annotations

import sys

from session import make_session, time_calls

from horovod_spark_runner import HorovodRunner


def function() -> float:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    return float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum))


def main() -> None:
    ranks, calls = int(sys.argv[1]), int(sys.argv[2])
    spark = make_session(ranks)
    runner = HorovodRunner(ranks)
    result = time_calls(calls, lambda: runner.run(function))
    assert result.results == (float(ranks),) * ranks
    spark.stop()


if __name__ == "__main__":
    main()
