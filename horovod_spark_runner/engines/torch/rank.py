"""A rank's process, made ready for PyTorch, and its traces."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

from ...errors import EnvironmentProblem
from ...training.traces import Timeline


def begin(seed: int) -> None:
    """Join Horovod, seed all generators and take this rank's cores.

    Raises:
        EnvironmentProblem: Horovod was built without PyTorch.
    """
    try:
        hvd.init()
    except (AttributeError, ImportError) as error:
        raise EnvironmentProblem(
            f"Horovod was built without PyTorch ({error}); once PyTorch is installed, run "
            "horovod-spark-runner install-horovod"
        ) from error
    # What a copy of a process has found out of its cores is not this rank's, which may be bound.
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, min(threads, cores) if threads else cores))
    _seed_generators(seed)


def _seed_generators(seed: int) -> None:
    """Seed Python's generator, NumPy's and PyTorch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rank_device() -> torch.device:
    """Return the GPU that Spark assigned to this rank, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TorchTracer:
    """Horovod's timeline, and PyTorch's profiler."""

    def __init__(self) -> None:
        self._timeline = Timeline(hvd)
        self._profiler: torch.profiler.profile | None = None

    def start_timeline(self, file: Path) -> None:
        self._timeline.start(file)

    def stop_timeline(self) -> None:
        self._timeline.stop()

    def start_profile(self) -> None:
        self._profiler = torch.profiler.profile(record_shapes=True)
        self._profiler.start()

    def stop_profile(self, folder: Path, name: str) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        # As TensorBoard's plugin wants it to be called.
        file = folder / f"{socket.gethostname()}.{name}.pt.trace.json"
        self._profiler.export_chrome_trace(str(file))
        self._profiler = None
