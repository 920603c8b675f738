"""What is kept of a training: everything that two of them are compared by."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Method, index (None where there is none), logs.
Call = tuple[str, int | None, dict[str, Any]]


@dataclass
class Recording:
    """One training.

    Attributes:
        error: class and message of what it raised; empty if it came to its end.
        trace: where it was raised.
        weights: the model's weights by place and path.
        optimizer: the optimizer's variables by place and path.
        history: metrics of each epoch, as ``Model.fit`` returns them.
        calls: the callback calls.
        params: what callbacks find in ``params`` when training begins.
        files: files that callbacks wrote, without numbers, and the text of those that are text.
        predictions: outputs on the validation data, by what predicted.
        failures: what a prediction raised, by what predicted.
        seconds: time it took.
    """

    error: str = ""
    trace: str = ""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    optimizer: dict[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    predictions: dict[str, list[np.ndarray]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


_JSON = ("error", "trace", "history", "calls", "params", "files", "failures", "seconds")


def save(recording: Recording, path: Path) -> None:
    """Write a recording; who sees the file sees all of it."""
    arrays: dict[str, Any] = {f"weights/{name}": value for name, value in recording.weights.items()}
    arrays.update({f"optimizer/{name}": value for name, value in recording.optimizer.items()})
    for kind, outputs in recording.predictions.items():
        arrays.update({f"predictions/{kind}/{i:03d}": value for i, value in enumerate(outputs)})
    rest = json.dumps({name: getattr(recording, name) for name in _JSON}, default=plain)
    buffer = io.BytesIO()
    savable: dict[str, Any] = {name: _savable(value) for name, value in arrays.items()}
    # Names with slashes and all sorts of numbers are keys of the archive; text is an array too.
    np.savez(buffer, json=np.array(rest), **savable)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_bytes(buffer.getvalue())
    aside.rename(path)


def load(path: Path) -> Recording:
    """Read what `save` wrote."""
    with np.load(path) as archive:
        recording = Recording(**json.loads(str(archive["json"])))
        recording.calls = [(method, index, logs) for method, index, logs in recording.calls]
        for key in archive.files:
            group, _, name = key.partition("/")
            if group == "predictions":
                recording.predictions.setdefault(name.partition("/")[0], []).append(archive[key])
            elif name:
                getattr(recording, group)[name] = archive[key]
    return recording


def _savable(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16


def plain(value: Any) -> Any:
    """Return numbers and arrays of any framework as JSON has them."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    array = np.asarray(value)
    if array.dtype.kind == "V":  # bfloat16
        array = array.astype(np.float32)
    return array.tolist() if array.dtype.kind in "fiub" else str(value)


def recorder() -> Any:
    """Return a Keras callback that notes all calls in ``calls`` and ``params``."""
    import keras

    class Recorder(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Call] = []
            self.first_params: dict[str, Any] = {}

        def note(self, method: str, index: int | None, logs: Any) -> None:
            self.calls.append((method, index, plain(logs or {})))

        def on_train_begin(self, logs: Any = None) -> None:
            self.first_params = dict(self.params)
            self.note("on_train_begin", None, logs)

        def on_train_end(self, logs: Any = None) -> None:
            self.note("on_train_end", None, logs)

        def on_test_begin(self, logs: Any = None) -> None:
            self.note("on_test_begin", None, logs)

        def on_test_end(self, logs: Any = None) -> None:
            self.note("on_test_end", None, logs)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.note("on_epoch_begin", epoch, logs)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.note("on_epoch_end", epoch, logs)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.note("on_train_batch_begin", batch, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.note("on_train_batch_end", batch, logs)

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.note("on_test_batch_begin", batch, logs)

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.note("on_test_batch_end", batch, logs)

    return Recorder()
