"""The same loop by Spark's TorchDistributor: torch_distributor.py PARQUET EPOCHS OUT."""

import sys
import time

from calls import note_call
from ddp import train
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    for call in range(2):
        began = time.perf_counter()
        distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
        distributor.run(train, sys.argv[1], int(sys.argv[2]), sys.argv[3])
        note_call(sys.argv[3], call, time.perf_counter() - began)
    spark.stop()
