"""Traces of a rank that trains with Keras; see `Tracer`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

from ...training.traces import Timeline
from .scope import runner_variable


class KerasTracer:
    """Horovod's timeline, and TensorFlow's profiler."""

    def __init__(self) -> None:
        self._timeline = Timeline(hvd)
        self._place = ""

    def start_timeline(self, file: Path) -> None:
        self._timeline.start(file)

    def stop_timeline(self) -> None:
        self._timeline.stop()

    def start_profile(self) -> None:
        self._place = tempfile.mkdtemp(prefix="tf-profile-")
        tf.profiler.experimental.start(self._place)

    def stop_profile(self, folder: Path, name: str) -> None:
        try:
            tf.profiler.experimental.stop()
            # TensorFlow names it after the time.
            (made,) = Path(self._place, "plugins", "profile").iterdir()
            target = folder / "plugins" / "profile" / name
            target.parent.mkdir(parents=True)
            shutil.move(made, target)
        finally:
            shutil.rmtree(self._place, ignore_errors=True)


class Stopwatch:
    """Adds up, inside compiled steps, the time from when some tensors are there to others.

    It waits for no tensor that the step would not wait for, and nothing of the step waits for it.
    On a GPU it knows nothing: there a tensor counts as there once its making is queued.
    """

    def __init__(self) -> None:
        self._runs = hvd.size() > 1 and not tf.config.list_logical_devices("GPU")
        self._seconds = runner_variable(0.0, tf.float64)

    def begin(self, tensors: Sequence[tf.Tensor | None]) -> tf.Tensor | None:
        """Return the time at which all ``tensors`` are computed, for `end`."""
        return self._moment(tensors) if self._runs else None

    def end(self, start: tf.Tensor | None, tensors: Sequence[tf.Tensor | None]) -> None:
        """Add up the time from a moment until all of ``tensors`` are there."""
        if start is not None:
            self._seconds.assign_add(self._moment(tensors) - start)

    @property
    def seconds(self) -> float | None:
        """Sum over all steps so far; ``None`` where it is unknown."""
        if not self._runs:
            return 0.0 if hvd.size() == 1 else None
        return float(self._seconds.numpy())

    def _moment(self, tensors: Sequence[tf.Tensor | None]) -> tf.Tensor:
        with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
            return tf.timestamp()
