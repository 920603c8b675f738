"""Run by a test: a transformer is used in two Spark sessions, one after the other."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from horovod_spark_runner import TFTransformer


def main() -> None:
    transformer = TFTransformer.from_run(sys.argv[1])
    for _ in range(2):
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .getOrCreate()
        )
        frame = spark.createDataFrame([([1.0, 2.0, 3.0], 4)], "x array<float>, n int")
        print("predicted", transformer.transform(frame).first().prediction)
        spark.stop()


if __name__ == "__main__":
    main()
