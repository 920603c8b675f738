"""Traces of a rank that trains with Keras; see `Tracer`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

from ...training.traces import Timeline


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
