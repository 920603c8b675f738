"""States of torchmetrics' objects: as bytes, and merged by the reductions that they were made with.

A record holds the states of some metrics, as one rank or task has them. Records stand one after the
other in an array of bytes, so that joining such arrays loses nothing; they are merged where a
result is computed, and where other ranks resume. torchmetrics itself is never imported here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import RunDirectoryError
from ...storage.arrays import Arrays, dump_arrays, load_arrays
from .variables import ByteVariable, as_array

_LENGTH = np.dtype("<i8")
_UPDATES = "updates"


def is_torchmetrics(value: object) -> bool:
    """Return whether ``value`` is a metric, or a collection, of torchmetrics."""
    names = ("Metric", "MetricCollection")
    return any(
        cls.__module__.startswith("torchmetrics.") and cls.__name__ in names
        for cls in type(value).__mro__
    )


class MetricStates(ByteVariable):
    """States of metrics, as a variable that checkpoints hold for each rank.

    Args:
        metrics: the metrics, each with states of its own.
    """

    def __init__(self, metrics: Sequence[Any]) -> None:
        self.path = "torchmetrics"
        self._metrics = metrics

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def numpy(self) -> np.ndarray:
        """Return this rank's record."""
        arrays: Arrays = {}
        for number, metric in enumerate(self._metrics):
            arrays.update(_state(f"{number:05d}", metric))
        return _record(arrays)

    def assign(self, value: np.ndarray) -> None:
        """Restore the states from `numpy`, or from several such arrays joined.

        Raises:
            RunDirectoryError: they are of other metrics, or cannot be merged before a result is
                computed.
        """
        self._set(list(_records(value)), goes_on=True)

    def reset(self) -> None:
        """Reset all metrics."""
        for number in range(len(self._metrics)):
            self.forget(number)

    def forget(self, number: int) -> None:
        """Reset one metric."""
        _clear(self._metrics[number])

    @contextlib.contextmanager
    def merged(self, parts: Sequence[np.ndarray]) -> Iterator[None]:
        """Merge ``parts`` into the metrics, temporarily.

        Args:
            parts: what `numpy` returned on each rank, or in each task.
        """
        saved = [_held(metric) for metric in self._metrics]
        self._set([record for part in parts for record in _records(part)])
        seen = [metric._update_count for metric in self._metrics]
        try:
            yield
        finally:
            for number, (metric, (state, updates)) in enumerate(
                zip(self._metrics, saved, strict=True)
            ):
                if seen[number] and not metric._update_count:  # somebody has reset it
                    self.forget(number)
                else:
                    _give(metric, state, updates)

    def _set(self, records: Sequence[Arrays], *, goes_on: bool = False) -> None:
        for number, metric in enumerate(self._metrics):
            prefix = f"{number:05d}/"
            parts = [
                {n.removeprefix(prefix): a for n, a in record.items() if n.startswith(prefix)}
                for record in records
            ]
            _check_same(metric, parts)
            seen = [part for part in parts if int(part[_UPDATES])]
            if goes_on and len(seen) > 1:
                _check_goes_on(metric, len(records))
            _merge(metric, seen)


def _record(arrays: Arrays) -> np.ndarray:
    data = np.frombuffer(bytes(dump_arrays(arrays)), np.uint8)
    return np.concatenate([np.array([data.size], _LENGTH).view(np.uint8), data])


def _records(joined: np.ndarray) -> Iterator[Arrays]:
    begin = 0
    while begin < joined.size:
        after = begin + _LENGTH.itemsize
        length = int(np.ascontiguousarray(joined[begin:after]).view(_LENGTH)[0])
        begin = after + length
        yield load_arrays(joined[after:begin].tobytes())


def _clear(metric: Any) -> None:
    type(metric).reset(metric)


def _held(metric: Any) -> tuple[dict[str, Any], int]:
    state = {
        name: list(value) if isinstance(value := getattr(metric, name), list) else value
        for name in metric._defaults
    }
    return state, metric._update_count


def _give(metric: Any, state: dict[str, Any], updates: int) -> None:
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = updates
    metric._computed = metric._forward_cache = None


def _state(prefix: str, metric: Any) -> Arrays:
    arrays: Arrays = {f"{prefix}/{_UPDATES}": np.array(metric._update_count)}
    for name in metric._defaults:
        value = getattr(metric, name)
        if not isinstance(value, list):
            arrays[f"{prefix}/tensor/{name}"] = as_array(value).copy()
            continue
        # One array of all batches, where that is what becomes of them anyway.
        reduce = metric._reductions[name]
        whole = [reduce(value)] if len(value) > 1 and _named(reduce) == "cat" else value
        for number, one in enumerate(whole):
            arrays[f"{prefix}/list/{name}/{number:05d}"] = as_array(one).copy()
    return arrays


def _merge(metric: Any, seen: Sequence[Arrays]) -> None:
    """Assign a metric the merged state of all parts that have rows."""
    _clear(metric)
    if not seen:
        return
    updates = [int(part[_UPDATES]) for part in seen]
    state: dict[str, Any] = {}
    for name, default in metric._defaults.items():
        device = metric.device
        if isinstance(default, list):
            prefix = f"list/{name}/"
            state[name] = [
                _tensor(part[key], device)
                for part in seen
                for key in sorted(part)
                if key.startswith(prefix)
            ]
        else:
            values = [_tensor(part[f"tensor/{name}"], device) for part in seen]
            state[name] = _reduced(values, metric._reductions[name], updates)
    _give(metric, state, sum(updates))


def _reduced(values: Sequence[Tensor], reduce: Any, updates: Sequence[int]) -> Tensor:
    if len(values) == 1:
        return values[0]
    if _named(reduce) == "mean":
        weights = [count / sum(updates) for count in updates]
        return torch.stack([v * w for v, w in zip(values, weights, strict=True)]).sum(0)
    if _named(reduce) == "cat":
        joined: Tensor = reduce(list(values))
        return joined
    stacked = torch.stack(list(values))
    reduced: Tensor = stacked if reduce is None else reduce(stacked)
    return reduced


def _named(reduce: Any) -> str:
    """Return which of torchmetrics' own reductions it is."""
    name = getattr(reduce, "__name__", "")
    return name.removeprefix("dim_zero_") if name.startswith("dim_zero_") else ""


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(array)).to(device)


def _check_same(metric: Any, parts: Sequence[Arrays]) -> None:
    wanted = set(metric._defaults)
    for part in parts:
        names = {key.split("/")[1] for key in part if key != _UPDATES}
        tensors = {n for n, default in metric._defaults.items() if not isinstance(default, list)}
        if _UPDATES not in part or not tensors <= names <= wanted:
            raise RunDirectoryError(
                "the checkpoint was taken within an epoch by a model with other metrics than "
                f"{type(metric).__name__}; give the same ones, and change them when that epoch is "
                "over"
            )


def _check_goes_on(metric: Any, ranks: int) -> None:
    """Check that a metric can take more rows after merging several ranks' states.

    What torchmetrics only stacks is one value for each rank, which `compute` alone can take.
    """
    for name, default in metric._defaults.items():
        if not isinstance(default, list) and not _named(metric._reductions[name]):
            raise RunDirectoryError(
                f"the checkpoint was taken within an epoch on {ranks} ranks, and what "
                f"{type(metric).__name__} has seen cannot be merged before the epoch's end: resume "
                f"with {ranks} ranks, or from the checkpoint before that epoch"
            )
