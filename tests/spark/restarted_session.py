"""Run by a test: a transformer in two Spark sessions, one after the other, and after both."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from horovod_spark_runner import InvalidInputError, TFTransformer, run_training


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
    # What is left of a DataFrame is refused by its name.
    for use in (
        lambda: transformer.transform(frame),
        lambda: transformer.evaluate(frame, ["mse"]),
        lambda: run_training(frame, object, feature_cols=["x"]),
    ):
        try:
            use()
        except InvalidInputError as error:
            print("stopped" if "session" in str(error) else error)


if __name__ == "__main__":
    main()
