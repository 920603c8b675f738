"""Losses and metrics of rows, as sums and states that can be merged over ranks, tasks and batches.

States of torchmetrics' objects travel as records, each with the states of all metrics on one rank
or in one task. Records stand one after the other in an array of bytes, so that joining such arrays
loses nothing. They are merged where a result is computed, and where other ranks resume, by the
reductions that the metrics were made with. torchmetrics itself is never imported here.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError, RunDirectoryError, brief
from ...storage.arrays import Arrays, dump_arrays, load_arrays
from ...training.spec import Binding
from .losses import LOSS, SUM, Losses, Pairing, Term
from .model import one_number, output_leaves
from .state import ByteVariable, as_array, as_tensor
from .torch_model import MetricLike, TorchModel

_Function = Callable[[Any, Any], Any]
_ACCURACY = "accuracy"
# The default `ignore_index` of PyTorch's losses of classes.
_IGNORED = -100
# The bytes before a record, its length, and the key of how often a metric was updated.
_LENGTH = np.dtype("<i8")
_UPDATES = "updates"


class Results:
    """The results of a training or an evaluation, of the rows added so far.

    Args:
        losses: the losses; ``None`` if nothing but metrics is known.
        metrics: the metrics, from one source or several.
        device: where sums are added up.

    Attributes:
        losses: the losses.
        objects: the metrics with states.
        sums: the sums that means are made of.
    """

    def __init__(
        self, losses: Losses | None, metrics: Sequence[Metrics], device: torch.device
    ) -> None:
        self.losses = losses
        self.objects = [each for one in metrics for each in one.objects]
        self.sums = Sums(device)
        self._metrics = metrics
        self._loss_names = [] if losses is None else losses.names
        self._means = [*self._loss_names, *(name for one in metrics for name in one.names)]
        every = [*{LOSS, *self._loss_names}, *(n for one in metrics for n in one.names)]
        every += self._of_objects
        if twice := sorted({name for name in every if every.count(name) > 1}):
            raise ModelError(
                f"several losses and metrics are called {', '.join(map(repr, twice))}; give the "
                "metrics other names, metrics={name: function}"
            )
        self.sums.declare(self._means)

    @property
    def names(self) -> list[str]:
        """Names of all results so far."""
        return [*self.sums.names, *self._of_objects]

    @property
    def _of_objects(self) -> list[str]:
        return [name for one in self._metrics for name in one.of_objects]

    @property
    def variables(self) -> list[ByteVariable]:
        """The sums and states, whose bytes can be joined over ranks and tasks."""
        return [self.sums, *(one.states for one in self._metrics if one.states)]

    def loss_functions(self) -> list[tuple[str, _Function]]:
        """Return the user's own losses, which may be no means over rows, by their names."""
        return [] if self.losses is None else self.losses.functions()

    def metric_functions(self) -> list[tuple[str, _Function]]:
        """Return the user's own metrics, which may be no means over rows, by their names."""
        return [pair for one in self._metrics for pair in one.functions()]

    def reset(self) -> None:
        """Forget all rows."""
        self.sums.reset()
        for one in self._metrics:
            one.states.reset()

    def add(self, outputs: Any, target: Any, terms: Sequence[Term], batches: float) -> None:
        """Add a batch.

        Args:
            outputs: what the module gave.
            target: all labels.
            terms: the losses.
            batches: what this counts for where batches are counted, of what is a sum over rows; 1
                for the parts of a global batch together.
        """
        for term in terms:
            count = batches if term.kind == SUM else term.count
            self.sums.add(term.name, term.summed, count)
        for one in self._metrics:
            one.update(self.sums, outputs, target)

    def means(self, *, required: bool = True) -> dict[str, float]:
        """Return the means over rows, with the sum of several losses as ``loss``.

        Args:
            required: whether losses and metrics are reported where nothing counted, as NaN.
        """
        results = self.sums.results(required=self._means if required else ())
        names = self._loss_names
        if len(names) < 2 or not results.keys() >= set(names):
            return results
        return {LOSS: sum(results[name] for name in names), **results}

    def local(self, *, required: bool = True) -> dict[str, object]:
        """Return the results of this rank's rows; see `means`."""
        results: dict[str, object] = dict(self.means(required=required))
        for one in self._metrics:
            results.update(one.computed_here())
        return results

    def merge(
        self, parts: Sequence[Sequence[np.ndarray]], *, required: bool = True
    ) -> dict[str, Any]:
        """Return the results of all rows; see `means`.

        Args:
            parts: for each of `variables`, its bytes on each rank or in each task.
            required: see `means`.
        """
        self.sums.assign(np.concatenate(parts[0]))
        results: dict[str, Any] = dict(self.means(required=required))
        with_states = [one for one in self._metrics if one.states]
        for one, states in zip(with_states, parts[1:], strict=True):
            results.update(one.computed(states))
        return results


def training_results(
    model: TorchModel, labels: Binding, device: torch.device
) -> tuple[Losses | None, Metrics]:
    """Return the losses and metrics of a `TorchModel`, to be computed on a device."""
    losses = None if model.loss is None else Losses(model.loss, labels).to(device)
    return losses, Metrics(model.metrics, device, model.loss)


class Sums(ByteVariable):
    """Sums of values and their divisors, by name.

    Args:
        device: where they are added up.
    """

    def __init__(self, device: torch.device) -> None:
        self.path = "sums"
        self._device = device
        # A sum and its divisor, which are added to in place.
        self._cells: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The names there are, in the order in which they came."""
        return list(self._cells)

    def numpy(self) -> np.ndarray:
        """Return all of them, as a line of JSON."""
        return np.frombuffer(f"{json.dumps(self._pairs())}\n".encode(), np.uint8)

    def assign(self, value: np.ndarray) -> None:
        """Restore the sums from `numpy`, or from several such arrays added up by name."""
        self.reset()
        for line in value.tobytes().decode().splitlines():
            for name, (total, count) in json.loads(line).items():
                self.add(name, total, count)

    def reset(self) -> None:
        """Begin new sums."""
        for cell in self._cells.values():
            cell.zero_()

    def declare(self, names: Iterable[str]) -> None:
        """Register names, which fixes the order of their results."""
        for name in names:
            if name not in self._cells:
                self._cells[name] = torch.zeros(2, dtype=torch.float64, device=self._device)

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to the sums of ``name``."""
        self.declare([name])
        cell = self._cells[name]
        cell[0].add_(total.detach() if isinstance(total, Tensor) else total)
        cell[1].add_(count)

    def results(self, *, required: Collection[str] = ()) -> dict[str, float]:
        """Return the means there are.

        Args:
            required: names reported also where nothing counted, as NaN: PyTorch's mean over labels
                that are all ignored is none.
        """
        return {
            name: total / count if count else math.nan
            for name, (total, count) in self._pairs().items()
            if count or name in required
        }

    def _pairs(self) -> dict[str, tuple[float, float]]:
        if not self._cells:
            return {}
        cells = torch.stack(list(self._cells.values())).tolist()
        return dict(zip(self._cells, map(tuple, cells), strict=True))


class Metrics:
    """The metrics of a `TorchModel`.

    Args:
        metrics: `TorchModel.metrics`.
        device: where outputs are.
        loss: `TorchModel.loss`, by which accuracy is computed.

    Attributes:
        states: the states of torchmetrics' objects.

    Raises:
        ModelError: one cannot be used; the message names it.
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | None,
        device: torch.device,
        loss: Any = None,
    ) -> None:
        self._functions: dict[str, _Function] = {}
        self._pairings: dict[str, Pairing] = {}
        self._objects: dict[str, Any] = {}
        for name, metric in _by_name(metrics).items():
            if is_torchmetrics(metric):
                for full, one in _members(name, metric, isinstance(metrics, Mapping)):
                    # A copy: what it has seen elsewhere does not count here.
                    self._objects[full] = copy.deepcopy(one).to(device)
                continue
            self._functions[name] = _function(name, metric, loss)
            if not isinstance(metric, str):
                self._pairings[name] = Pairing(f"metric {name!r}", metric)
        self.states = MetricStates(list(self._objects.values()))
        self.states.reset()

    @property
    def names(self) -> list[str]:
        """Names, in the results, of metrics that are means over rows."""
        return list(self._functions)

    @property
    def of_objects(self) -> list[str]:
        """Names of the metrics with states."""
        return list(self._objects)

    @property
    def objects(self) -> list[object]:
        """The metrics with states."""
        return list(self._objects.values())

    def __bool__(self) -> bool:
        return bool(self._functions or self._objects)

    def functions(self) -> list[tuple[str, _Function]]:
        """Return the user's own functions, which may be no means over rows, by their names."""
        return [(name, self._functions[name]) for name in self._pairings]

    def update(self, sums: Sums, outputs: Any, target: Any) -> None:
        """Add a batch to the sums and states.

        Raises:
            ModelError: a metric gave something else than it may.
        """
        rows = next(output_leaves(outputs))[1].shape[0]
        for name, function in self._functions.items():
            value = function(outputs, target)
            if name in self._pairings:
                self._pairings[name].check(outputs, target, value)
            sums.add(name, *_summed(name, value, rows))
        if not self._objects:
            return
        output, label = _single(next(iter(self._objects)), outputs, target)
        if label.numel() == output.numel():  # a column of numbers beside one output of a number
            label = label.reshape(output.shape)
        for name, metric in self._objects.items():
            try:
                metric.update(output, label)
            except (ValueError, TypeError, RuntimeError, IndexError) as error:
                raise ModelError(
                    f"metric {name!r} ({type(metric).__name__}) cannot take outputs of shape "
                    f"{tuple(output.shape)}, {output.dtype}, and labels of shape "
                    f"{tuple(label.shape)}, {label.dtype}: {error}"
                ) from error

    def computed(self, parts: Sequence[np.ndarray]) -> dict[str, Any]:
        """Return the results of the metrics with states, merged from ``parts``.

        Args:
            parts: what `MetricStates.numpy` gave, on each rank or in each task.
        """
        with self.states.merged(parts):
            return self._computed()

    def computed_here(self) -> dict[str, Any]:
        """Return the results of this rank's rows; NaN where they are too few."""
        return self._computed((ValueError, RuntimeError, IndexError))

    def _computed(self, tolerated: tuple[type[Exception], ...] = ()) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for name, metric in self._objects.items():
            if metric._update_count:
                try:
                    results.update(_report_values(name, metric.compute()))
                except tolerated:
                    results[name] = math.nan
        return results


def _by_name(metrics: Any) -> Mapping[str, Any]:
    if is_torchmetrics(metrics):  # a collection of some, or a single one
        metrics = (metrics,)
    if isinstance(metrics, (str, Tensor)) or not isinstance(metrics or (), (Mapping, Sequence)):
        raise ModelError(
            "metrics must be a list or a dictionary of functions of outputs and labels, got "
            f"{brief(metrics)}"
        )
    named = metrics if isinstance(metrics, Mapping) else {_name(one): one for one in metrics or ()}
    if len(named) != len(metrics or ()):
        raise ModelError("two metrics have the same name; give metrics as a dictionary")
    return named


def _name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    return getattr(metric, "__name__", None) or type(metric).__name__


def _function(name: str, metric: Any, loss: Any) -> _Function:
    if metric == _ACCURACY:
        accuracy = _Accuracy(loss)
        return lambda outputs, target: accuracy(*_single(name, outputs, target))
    if isinstance(metric, str):
        if metric not in _BUILT_IN:
            raise ModelError(
                f"metric {metric!r} is not known; there are "
                f"{', '.join(sorted([_ACCURACY, *_BUILT_IN]))}, or give a function of outputs and "
                "labels"
            )
        return _BUILT_IN[metric]
    if isinstance(metric, type) or not callable(metric):
        raise ModelError(
            f"metric {name!r} must be a function of outputs and labels, got {brief(metric)}"
        )
    return cast("_Function", metric)


def asks_accuracy(metrics: object) -> bool:
    """Return whether accuracy is among metrics, in a list or a dictionary."""
    listed = metrics.values() if isinstance(metrics, Mapping) else cast("list[object]", metrics)
    return any(isinstance(one, str) and one == _ACCURACY for one in listed)


def _summed(name: str, value: Any, rows: int) -> tuple[Tensor | float, Tensor | float]:
    """Return a metric's value for a batch as a sum and its divisor.

    Raises:
        ModelError: it is neither a number, nor one for each row, nor such a pair.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        total, count = map(one_number, value)
        if total is not None and count is not None:
            return total, count
    mean = one_number(value)
    if mean is not None:
        return mean * rows, rows
    if isinstance(value, Tensor) and value.shape[0] == rows:
        return value.reshape(rows, -1).double().mean(1).sum(), rows
    shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else brief(value)
    raise ModelError(
        f"metric {name!r} must return one value per row, a mean over the rows, or a pair of a sum "
        f"and what it is divided by, but returned {shown} for {rows} rows"
    )


def _single(name: str, outputs: Any, target: Any) -> tuple[Tensor, Tensor]:
    tensors = list(output_leaves(outputs))
    if len(tensors) != 1 or not isinstance(target, Tensor):
        raise ModelError(
            f"metric {name!r} compares one output with one label; give a function of all outputs "
            "and labels"
        )
    return tensors[0][1], target


def _difference(name: str, outputs: Any, target: Any) -> Tensor:
    output, label = _single(name, outputs, target)
    return output - label.reshape(output.shape)


_BUILT_IN: dict[str, _Function] = {
    "mae": lambda outputs, target: _difference("mae", outputs, target).abs(),
    "mse": lambda outputs, target: _difference("mse", outputs, target).square(),
}


class _Accuracy:
    """Accuracy of classes.

    Args:
        loss: the loss, by which it is known which labels do not count, and from where on one number
            per row is true; something else than one of ``torch.nn`` says neither.
    """

    def __init__(self, loss: Any) -> None:
        made = getattr(nn, loss, None) if isinstance(loss, str) else loss
        kind = made if isinstance(made, type) else type(made)
        self._loss = loss
        # What a loss of the user's own takes is unknown.
        self._of_probabilities = not kind.__module__.startswith("torch.nn.") or issubclass(
            kind, (nn.CrossEntropyLoss, nn.KLDivLoss)
        )
        self._ignored = getattr(made, "ignore_index", _IGNORED)
        self._least: float | None = None
        if issubclass(kind, (nn.BCEWithLogitsLoss, nn.BCELoss)):
            self._least = 0.5 if issubclass(kind, nn.BCELoss) else 0.0

    def __call__(self, output: Tensor, label: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return how many rows are right, and how many count.

        Raises:
            ModelError: there are no classes.
        """
        if output.dim() > 1 and output.shape[1] > 1 and self._least is None:
            predicted = output.argmax(1)
            if label.shape == output.shape:
                ones = ((label == 0) | (label == 1)).all() and (label.sum(1) == 1).all()
                if not self._of_probabilities and not ones:
                    raise ModelError(
                        f"metric 'accuracy' takes labels of the output's shape, "
                        f"{tuple(output.shape)}, as classes only if they are one-hot, or "
                        "probabilities with CrossEntropyLoss or KLDivLoss; with "
                        f"loss={brief(self._loss)}, give a function of outputs and labels"
                    )
                return (predicted == label.argmax(1)).sum(), float(predicted.numel())
            label = label.reshape(predicted.shape)
            counted = label != self._ignored
            return ((predicted == label) & counted).sum(), counted.sum()
        if self._least is None or output.numel() != label.numel():
            raise ModelError(
                "metric 'accuracy' compares classes, but the output has one number per row, and no "
                "loss says from where on it is true, as BCEWithLogitsLoss and BCELoss do; give a "
                "function of outputs and labels"
            )
        right = (output > self._least) == (label.reshape(output.shape) > 0.5)
        return right.sum(), float(right.numel())


# -- torchmetrics ----------------------------------------------------------------------------------


def is_torchmetrics(value: object) -> bool:
    """Return whether ``value`` is a metric, or a collection, of torchmetrics."""
    names = ("Metric", "MetricCollection")
    return any(
        cls.__module__.startswith("torchmetrics.") and cls.__name__ in names
        for cls in type(value).__mro__
    )


def _members(name: str, metric: Any, named: bool) -> Iterator[tuple[str, Any]]:
    """Yield a metric of torchmetrics, or those of a collection, with their names."""
    members = {name: metric}
    if hasattr(metric, "add_metrics"):
        members = {f"{name}_{key}" if named else str(key): one for key, one in metric.items()}
    for full, one in members.items():
        inner = [each for each in one.modules() if each is not one and is_torchmetrics(each)]
        if inner or not one._defaults:
            raise ModelError(
                f"metric {full!r} is a {type(one).__name__}, which keeps its states in other "
                "metrics; give those, each with a name of its own"
            )
        yield full, one


def _report_values(name: str, value: Any) -> dict[str, Any]:
    """Return a metric's results by name: numbers, or lists of these."""
    if isinstance(value, Mapping):
        return {
            f"{name}_{key}": number
            for k, v in value.items()
            for key, number in _report_values(k, v).items()
        }
    if isinstance(value, Tensor):
        return {name: value.detach().cpu().double().tolist()}
    if isinstance(value, (list, tuple)) and all(isinstance(each, Tensor) for each in value):
        return {name: [each.detach().cpu().double().tolist() for each in value]}
    return {name: value}


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
        arrays = {
            f"{number:05d}/{key}": array
            for number, metric in enumerate(self._metrics)
            for key, array in _dump_state(metric).items()
        }
        data = np.frombuffer(bytes(dump_arrays(arrays)), np.uint8)
        return np.concatenate([np.array([data.size], _LENGTH).view(np.uint8), data])

    def assign(self, value: np.ndarray) -> None:
        """Restore the states from `numpy`, or from several such arrays joined.

        Raises:
            RunDirectoryError: they are of other metrics, or cannot be merged before a result is
                computed.
        """
        self._set(list(_records(value)), resuming=True)

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self._metrics:
            _clear(metric)

    @contextlib.contextmanager
    def merged(self, parts: Sequence[np.ndarray]) -> Iterator[None]:
        """Merge ``parts`` into the metrics, temporarily.

        Args:
            parts: what `numpy` returned on each rank, or in each task.
        """
        saved = [_copy_state(metric) for metric in self._metrics]
        self._set([record for part in parts for record in _records(part)])
        seen = [metric._update_count for metric in self._metrics]
        try:
            yield
        finally:
            for metric, state, had in zip(self._metrics, saved, seen, strict=True):
                if had and not metric._update_count:  # reset meanwhile, on purpose
                    _clear(metric)
                else:
                    _set_state(metric, *state)

    def _set(self, records: Sequence[Arrays], *, resuming: bool = False) -> None:
        for number, metric in enumerate(self._metrics):
            prefix = f"{number:05d}/"
            parts = [
                {n.removeprefix(prefix): a for n, a in record.items() if n.startswith(prefix)}
                for record in records
            ]
            _check_same(metric, parts)
            seen = [part for part in parts if int(part[_UPDATES])]
            if resuming and len(seen) > 1:
                _check_resumable(metric, len(records))
            _merge(metric, seen)


def _records(joined: np.ndarray) -> Iterator[Arrays]:
    begin = 0
    while begin < joined.size:
        after = begin + _LENGTH.itemsize
        length = int(np.ascontiguousarray(joined[begin:after]).view(_LENGTH)[0])
        begin = after + length
        yield load_arrays(joined[after:begin].tobytes())


def _clear(metric: Any) -> None:
    type(metric).reset(metric)  # the class's own, as an object's may be wrapped


def _copy_state(metric: Any) -> tuple[dict[str, Any], int]:
    values = {name: getattr(metric, name) for name in metric._defaults}
    lists = {name: list(value) for name, value in values.items() if isinstance(value, list)}
    return {**values, **lists}, metric._update_count


def _set_state(metric: Any, state: Mapping[str, Any], updates: int) -> None:
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = updates
    metric._computed = metric._forward_cache = None


def _dump_state(metric: Any) -> Arrays:
    arrays: Arrays = {_UPDATES: np.array(metric._update_count)}
    for name in metric._defaults:
        value = getattr(metric, name)
        if not isinstance(value, list):
            arrays[f"tensor/{name}"] = as_array(value).copy()
            continue
        # One array of all batches, where that is what becomes of them anyway.
        reduce = metric._reductions[name]
        whole = [reduce(value)] if len(value) > 1 and _kind(reduce) == "cat" else value
        for number, one in enumerate(whole):
            arrays[f"list/{name}/{number:05d}"] = as_array(one).copy()
    return arrays


def _merge(metric: Any, seen: Sequence[Arrays]) -> None:
    """Assign a metric the merged state of all parts that have rows."""
    _clear(metric)
    if not seen:
        return
    updates = [int(part[_UPDATES]) for part in seen]
    state: dict[str, Any] = {}
    for name, default in metric._defaults.items():
        values = [
            as_tensor(part[key]).to(metric.device)
            for part in seen
            for key in sorted(part)
            if key == f"tensor/{name}" or key.startswith(f"list/{name}/")
        ]
        if isinstance(default, list):
            state[name] = values
        else:
            state[name] = _reduce(values, metric._reductions[name], updates)
    _set_state(metric, state, sum(updates))


def _reduce(values: Sequence[Tensor], reduce: Any, updates: Sequence[int]) -> Tensor:
    if len(values) == 1:
        return values[0]
    if _kind(reduce) == "mean":
        weights = [count / sum(updates) for count in updates]
        return torch.stack([v * w for v, w in zip(values, weights, strict=True)]).sum(0)
    stacked = list(values) if _kind(reduce) == "cat" else torch.stack(list(values))
    return cast("Tensor", stacked if reduce is None else reduce(stacked))


def _kind(reduce: Any) -> str:
    """Return which of torchmetrics' own reductions it is."""
    name = getattr(reduce, "__name__", "")
    return name.removeprefix("dim_zero_") if name.startswith("dim_zero_") else ""


def _check_same(metric: Any, parts: Sequence[Arrays]) -> None:
    wanted = set(metric._defaults)
    tensors = {n for n, default in metric._defaults.items() if not isinstance(default, list)}
    for part in parts:
        names = {key.split("/")[1] for key in part if key != _UPDATES}
        if _UPDATES not in part or not tensors <= names <= wanted:
            raise RunDirectoryError(
                "the checkpoint was taken within an epoch by a model with other metrics than "
                f"{type(metric).__name__}; give the same ones, and change them when that epoch is "
                "over"
            )


def _check_resumable(metric: Any, ranks: int) -> None:
    """Check that a metric can take more rows after merging several ranks' states.

    What torchmetrics only stacks is one value for each rank, which `compute` alone can take.
    """
    for name, default in metric._defaults.items():
        if not isinstance(default, list) and not _kind(metric._reductions[name]):
            raise RunDirectoryError(
                f"the checkpoint was taken within an epoch on {ranks} ranks, and what "
                f"{type(metric).__name__} has seen cannot be merged before the epoch's end: resume "
                f"with {ranks} ranks, or from the checkpoint before that epoch"
            )
