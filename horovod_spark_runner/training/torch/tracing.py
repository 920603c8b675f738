"""Traces of a rank that trains with PyTorch; see `Tracer`."""

from __future__ import annotations

import socket
from pathlib import Path

import horovod.torch as hvd
import torch

from ..timeline import Timeline


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
