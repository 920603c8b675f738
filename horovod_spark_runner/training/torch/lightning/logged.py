"""What a module of Lightning logs, as sums over rows that are merged over the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....errors import ModelError, brief
from ..metric_states import is_torchmetrics
from ..variables import ByteVariable

TRAINING, VALIDATION = "training", "validation"
# Hooks that log once for each batch, and those that do for an epoch.
_OF_BATCHES = {
    TRAINING: (
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    ),
    VALIDATION: ("validation_step", "on_validation_batch_start", "on_validation_batch_end"),
}
_OF_EPOCHS = {
    TRAINING: ("on_train_epoch_start", "on_train_epoch_end"),
    VALIDATION: (
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
    ),
}


@dataclass
class Entry:
    """What is logged by one name.

    Attributes:
        stage: `TRAINING` or `VALIDATION`.
        hook: the method that logs it.
        on_step: whether the value of the last step that logs it is told.
        on_epoch: whether the mean over the rows of the epoch is.
        metric: number of the metric of torchmetrics that is logged; -1 for a value.
        last: the sum over the rows of the last step that logs it, and their number.
        whole: those of the epoch.
        step: number of the last step that logs it, in its epoch.
    """

    stage: str
    hook: str
    on_step: bool
    on_epoch: bool
    metric: int = -1
    last: tuple[Tensor | float, float] = (0.0, 0.0)
    whole: tuple[Tensor | float, float] = (0.0, 0.0)
    step: int = -1

    @property
    def of_epoch(self) -> bool:
        """Whether it is logged once in an epoch, by each rank."""
        return self.hook in _OF_EPOCHS[self.stage]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("last", "whole"):
            total, count = found[name]
            found[name] = [float(total), float(count)]
        return found

    def same_way(self, other: Entry) -> bool:
        """Tell whether another one is logged alike."""
        named = ("stage", "hook", "on_step", "on_epoch", "metric")
        return all(getattr(self, name) == getattr(other, name) for name in named)


class Logged(ByteVariable):
    """What one rank has logged, by name; a variable that checkpoints hold for each rank.

    Args:
        metrics: the metrics of torchmetrics in the module.
        rank: this rank.
    """

    def __init__(self, metrics: Sequence[Any], rank: int) -> None:
        self.path = "logged"
        self._metrics = metrics
        self._rank = rank
        self._entries: dict[str, Entry] = {}

    def numpy(self) -> np.ndarray:
        """Return all of it, as a line of JSON."""
        text = json.dumps({name: one.as_json() for name, one in self._entries.items()})
        return np.frombuffer(f"{text}\n".encode(), np.uint8)

    def assign(self, value: np.ndarray) -> None:
        """Take over what `numpy` returned, or several such arrays joined."""
        self._entries = merged(_parsed(value))

    def reset(self, stage: str) -> None:
        """Begin a stage anew."""
        self._entries = {n: one for n, one in self._entries.items() if one.stage != stage}

    def metrics_of(self, stage: str) -> list[int]:
        """Return the numbers of the metrics that a stage has logged."""
        return [e.metric for e in self._entries.values() if e.stage == stage and e.metric >= 0]

    def log(
        self,
        name: str,
        value: Any,
        hook: str,
        rows: float,
        step: int,
        on_step: bool | None,
        on_epoch: bool | None,
    ) -> None:
        """Take note of what ``log`` is called with.

        Args:
            name: what it is called.
            value: a number, or a metric of torchmetrics.
            hook: the method that logs it.
            rows: what it counts by.
            step: number of the step in its epoch.
            on_step: see `Entry`; ``None`` for what Lightning takes for the hook.
            on_epoch: likewise.

        Raises:
            ModelError: it cannot be logged; the message names it.
        """
        entry = self._entry(name, value, hook, on_step, on_epoch)
        known = self._entries.setdefault(name, entry)
        if not known.same_way(entry):
            raise ModelError(
                f"{name!r} is logged by {hook} and by {known.hook}, or with other arguments; give "
                "it one name for each"
            )
        if entry.metric >= 0:
            self._check_stage(name, entry)
            return
        if entry.of_epoch:
            rows = 1.0
        number = _number(name, value)
        total = number * rows
        known.last, known.step = (total, rows), step
        known.whole = (known.whole[0] + total, known.whole[1] + rows)

    def _entry(
        self, name: str, value: Any, hook: str, on_step: bool | None, on_epoch: bool | None
    ) -> Entry:
        stage = next((s for s in _OF_BATCHES if hook in (*_OF_BATCHES[s], *_OF_EPOCHS[s])), None)
        if stage is None:
            raise ModelError(f"{hook} logs {name!r}, which is of no step and no epoch there")
        in_training = hook in _OF_BATCHES[TRAINING]
        if hook in _OF_EPOCHS[stage]:
            if on_step or on_epoch is False:
                raise ModelError(f"{hook} logs {name!r} for a step, but it is called once an epoch")
            on_step, on_epoch = False, True
        metric = -1
        if is_torchmetrics(value):
            metric = self._number_of(name, value)
            if on_step or (in_training and on_step is None and not on_epoch):
                raise ModelError(
                    f"{hook} logs the metric {name!r} for every step, which would be of one rank's "
                    "rows; log it with on_step=False, on_epoch=True"
                )
            on_step, on_epoch = False, True
        on_step = in_training if on_step is None else on_step
        on_epoch = not in_training if on_epoch is None else on_epoch
        return Entry(stage, hook, on_step, on_epoch, metric)

    def _check_stage(self, name: str, entry: Entry) -> None:
        for other, one in self._entries.items():
            if one.metric == entry.metric and one.stage != entry.stage:
                raise ModelError(
                    f"the metric {name!r} is logged in {entry.stage}, and as {other!r} in "
                    f"{one.stage}: it would be of the rows of both. Give each a metric of its own"
                )

    def _number_of(self, name: str, value: Any) -> int:
        for number, metric in enumerate(self._metrics):
            if metric is value:
                return number
        raise ModelError(
            f"{name!r} is logged as a {type(value).__name__} that keeps its states in other "
            "metrics, or is no attribute of the module; log those that are, each by a name"
        )


def merged(parts: Sequence[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Return what all parts have logged, as one. Pure.

    Raises:
        ModelError: what is logged once an epoch is not the same in all parts.
    """
    result: dict[str, Entry] = {}
    for part in parts:
        for name, one in part.items():
            known = result.get(name)
            if known is None:
                result[name] = Entry(**vars(one))
            elif one.of_epoch:
                same = np.allclose(_mean(known.whole), _mean(one.whole), rtol=1e-6, equal_nan=True)
                if not same:
                    raise ModelError(
                        f"{one.hook} logs {name!r}, which is {_mean(known.whole):g} on one rank "
                        f"and {_mean(one.whole):g} on another: it is of each rank's own rows. Log "
                        "it in the step, which is merged over the rows of all ranks, or let a "
                        "metric of torchmetrics compute it"
                    )
            else:
                # A rank without rows, or without such rows, may not have logged it as late.
                if one.step > known.step:
                    known.last, known.step = one.last, one.step
                elif one.step == known.step:
                    known.last = _sum(known.last, one.last)
                known.whole = _sum(known.whole, one.whole)
    return result


def results_of(entries: Mapping[str, Entry], stage: str) -> dict[str, float]:
    """Return the results of a stage by name, as Lightning's ``callback_metrics`` have them."""
    results: dict[str, float] = {}
    for name, one in entries.items():
        if one.stage != stage or one.metric >= 0:
            continue
        forked = one.on_step and one.on_epoch
        if one.on_step and stage == TRAINING and one.last[1]:
            results[f"{name}_step" if forked else name] = _mean(one.last)
        if one.on_epoch and one.whole[1]:
            if forked:
                results[f"{name}_epoch"] = _mean(one.whole)
            results[name] = _mean(one.whole)
    return results


def parts_of(arrays: Sequence[np.ndarray]) -> list[dict[str, Entry]]:
    """Return what several ranks have logged, given what `Logged.numpy` returned on each."""
    return [one for array in arrays for one in _parsed(array)]


def _parsed(value: np.ndarray) -> list[dict[str, Entry]]:
    return [
        {
            name: Entry(
                **{**fields, "last": tuple(fields["last"]), "whole": tuple(fields["whole"])}
            )
            for name, fields in json.loads(line).items()
        }
        for line in value.tobytes().decode().splitlines()
    ]


def _mean(pair: tuple[Tensor | float, float]) -> float:
    return float(pair[0]) / pair[1] if pair[1] else float("nan")


def _sum(
    one: tuple[Tensor | float, float], other: tuple[Tensor | float, float]
) -> tuple[float, float]:
    return float(one[0]) + float(other[0]), one[1] + other[1]


def _number(name: str, value: Any) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ModelError(f"{name!r} is logged with shape {tuple(value.shape)}, not one number")
        return value.detach().reshape(()).to(torch.float64)
    if isinstance(value, (bool, int, float, np.number)):
        return float(value)
    raise ModelError(f"{name!r} is logged as {brief(value)}, which is no number and no metric")
