"""What each rank keeps for itself: seeds of random layers, metric sums, generators, callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import RunDirectoryError
from ..storage.arrays import Arrays
from .keras.callback_state import CallbackStates
from .random_state import capture_random, restore_random
from .state import TrainingVariables, separate_seed


@dataclass(frozen=True)
class RankState:
    """The state of one rank.

    Attributes:
        values: what is JSON: ``random``, ``callbacks`` and, within an epoch, the names of
            ``metrics``.
        arrays: ``seed/…``, ``metric/…``, ``random/…`` and, of rank 0, ``callback/…``.
    """

    values: dict[str, Any]
    arrays: Arrays = field(repr=False)

    def group(self, name: str) -> Arrays:
        """Return the arrays whose names begin with ``name/``, without it."""
        prefix = f"{name}/"
        return {k.removeprefix(prefix): a for k, a in self.arrays.items() if k.startswith(prefix)}


def capture_rank(
    model: Any,
    variables: TrainingVariables,
    callbacks: CallbackStates,
    *,
    rank: int,
    in_epoch: bool,
) -> RankState:
    """Return a copy of this rank's state; the sums of metrics count within an epoch only."""
    random_values, random_arrays = capture_random()
    callback_values, callback_arrays = callbacks.capture()
    groups = {
        "seed": numbered(variables.seeds),
        "metric": numbered(metric_variables(model)) if in_epoch else {},
        "random": random_arrays,
        # Large ones (best weights) are the same on all ranks.
        "callback": callback_arrays if rank == 0 else {},
    }
    arrays = {f"{group}/{name}": a for group, part in groups.items() for name, a in part.items()}
    values: dict[str, Any] = {"random": random_values, "callbacks": callback_values}
    if in_epoch:
        values["metrics"] = [metric.name for metric in model.metrics]
    return RankState(values, arrays)


def restore_rank(
    state: RankState, model: Any, variables: TrainingVariables, callbacks: CallbackStates
) -> None:
    """Bring this rank to ``state``; metrics only where they are in it.

    Raises:
        RunDirectoryError: the model keeps other metrics now.
    """
    callbacks.restore(state.values["callbacks"], state.group("callback"))
    assign(variables.seeds, state.group("seed"))
    metrics = state.group("metric")
    if metrics:
        own = metric_variables(model)
        if [v.shape for v in own] != [metrics[name].shape for name in sorted(metrics)]:
            raise RunDirectoryError(
                "the checkpoint was taken within an epoch by a model compiled with other metrics "
                f"({_listed(state.values.get('metrics'))}, now "
                f"{_listed([metric.name for metric in model.metrics])}); compile it with the same "
                "ones, and change them when that epoch is over"
            )
        assign(own, metrics)
    restore_random(state.values["random"], state.group("random"))


def _listed(names: list[str] | None) -> str:
    return "unknown" if names is None else ", ".join(names) or "none"


def state_for(states: list[RankState], rank: int, size: int) -> RankState:
    """Return the state ``rank`` of ``size`` goes on with. Pure.

    With another number of ranks, the sums of metrics are added up on rank 0, and a rank that was
    not there before takes rank 0's generators; its random layers get a stream of their own.
    """
    first = states[0]
    own = states[rank] if rank < len(states) else first
    arrays = {**own.arrays, **{n: a for n, a in first.arrays.items() if n.startswith("callback/")}}
    if size != len(states):
        for name in first.arrays:
            if name.startswith("metric/"):
                total = np.sum([state.arrays[name] for state in states], axis=0)
                total = np.asarray(total, first.arrays[name].dtype)
                arrays[name] = total if rank == 0 else np.zeros_like(total)
        if rank >= len(states):
            for name, array in first.arrays.items():
                if name.startswith("seed/"):
                    arrays[name] = separate_seed(array, rank)
    return RankState(own.values, arrays)


def join_states(states: list[RankState]) -> Arrays:
    """Return the arrays of all ranks, their names led by the rank."""
    return {
        f"{rank:05d}/{name}": array
        for rank, state in enumerate(states)
        for name, array in state.arrays.items()
    }


def split_states(values: list[dict[str, Any]], arrays: Arrays) -> list[RankState]:
    """Return what `join_states` joined, in the order of ranks."""
    states = [RankState(value, {}) for value in values]
    for name, array in arrays.items():
        rank, _, rest = name.partition("/")
        states[int(rank)].arrays[rest] = array
    return states


def metric_variables(model: Any) -> list[Any]:
    """Return the variables in which the model's metrics keep their sums."""
    return [variable for metric in model.metrics for variable in metric.variables]


def numbered(variables: list[Any]) -> Arrays:
    """Return copies of the values, named by their place."""
    return {f"{number:05d}": np.array(v.numpy()) for number, v in enumerate(variables)}


def assign(variables: list[Any], arrays: Arrays) -> None:
    """Assign what `numbered` returned."""
    for number, variable in enumerate(variables):
        variable.assign(arrays[f"{number:05d}"])
