"""The PyTorch half of `training`: who is compared, and how fast each is."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model import SIDE, Rates, make_torch_network, seconds_of_training

LOOP = Path(__file__).resolve().parent / "peers" / "torch_loop.py"
BIND = "HSR_BENCHMARK_BIND"
OURS = "`run_training`"
DDP = "DistributedDataParallel, arrays in memory"
BOUND = "the same, each rank bound to a core"
DISTRIBUTOR = "the same script, by `TorchDistributor`"


def by_hand(
    arrays: Path, epochs: int, batch_size: int, network: str, *, bound: bool = False
) -> Rates:
    """Return how fast the loop is under torchrun, with gloo between two processes."""
    result = arrays.with_name("result.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(LOOP), str(arrays), str(epochs), str(batch_size), network]
    # The threads a rank of a one-core task gets from Spark.
    threads_and_pages = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    environment = {**os.environ, **threads_and_pages, **({BIND: "1"} if bound else {})}
    subprocess.run([*command, str(result)], check=True, env=environment)
    return Rates(**json.loads(result.read_text()))


def by_distributor(arrays: Path, epochs: int, batch_size: int, network: str) -> Rates:
    """Return how fast the same script is if Spark's TorchDistributor starts it."""
    from pyspark.ml.torch.distributor import TorchDistributor

    result = arrays.with_name("result.json")
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    distributor.run(str(LOOP), str(arrays), str(epochs), str(batch_size), network, str(result))
    return Rates(**json.loads(result.read_text()))


def ours(frame: Any, epochs: int, batch_size: int, network: str) -> Rates:
    """Return how fast ``run_training`` is."""
    rows = frame.count()
    with tempfile.TemporaryDirectory() as name:
        whole = seconds_of_training(
            frame,
            noting_maker(name, network),
            (1, SIDE, SIDE),
            stopwatch(name),
            Path(name),
            epochs,
            batch_size,
        )
        seconds = [float(Path(name, f"epoch-{epoch}").read_text()) for epoch in range(epochs)]
        return Rates([rows / each for each in seconds], epochs * rows / whole)


def noting_maker(folder: str, network: str) -> Any:
    """Return a function that makes the module and notes when it is made."""
    from horovod_spark_runner import TorchModel

    def make_model() -> TorchModel:
        import horovod.torch as hvd
        import torch

        module = make_torch_network(network)
        if hvd.rank() == 0:
            Path(folder, "made").write_text(repr(time.time()))
        return TorchModel(module, "CrossEntropyLoss", torch.optim.Adam, metrics=["accuracy"])

    return make_model


def stopwatch(folder: str) -> Any:
    """Return a function that makes the callback that times the epochs of rank 0."""

    def callbacks() -> list[Any]:
        import horovod.torch as hvd

        from horovod_spark_runner import TorchCallback

        class Stopwatch(TorchCallback):
            def on_epoch_begin(self, epoch: int) -> None:
                self.began = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: Any) -> None:
                if hvd.rank() == 0:
                    seconds = time.perf_counter() - self.began
                    Path(folder, f"epoch-{epoch}").write_text(repr(seconds))

        return [Stopwatch()]

    return callbacks


def contenders(
    arrays: Path, frame: Any, epochs: int, batch_size: int, network: str
) -> dict[str, Callable[[], Rates]]:
    """Return who is compared, by name."""
    given = (arrays, epochs, batch_size, network)
    return {
        DDP: functools.partial(by_hand, *given),
        BOUND: functools.partial(by_hand, *given, bound=True),
        DISTRIBUTOR: functools.partial(by_distributor, *given),
        OURS: functools.partial(ours, frame, epochs, batch_size, network),
    }
