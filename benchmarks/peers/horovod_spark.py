"""horovod.spark.run with one allreduce."""

from __future__ import annotations

import sys

from session import make_session, time_calls


def function() -> float:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    return float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum))


def main() -> None:
    ranks, calls = int(sys.argv[1]), int(sys.argv[2])
    spark = make_session(ranks)
    import horovod.spark

    result = time_calls(
        calls, lambda: horovod.spark.run(function, num_proc=ranks, use_gloo=True, verbose=0)
    )
    assert result == [float(ranks)] * ranks
    spark.stop()


if __name__ == "__main__":
    main()
