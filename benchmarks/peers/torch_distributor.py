"""TorchDistributor with one all_reduce."""

from __future__ import annotations

import sys

from session import make_session, time_calls


def function() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return float(value)


def main() -> None:
    ranks, calls = int(sys.argv[1]), int(sys.argv[2])
    spark = make_session(ranks)
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
    assert time_calls(calls, lambda: distributor.run(function)) == float(ranks)
    spark.stop()


if __name__ == "__main__":
    main()
