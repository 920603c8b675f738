"""State of one rank: seeds of random layers, metric sums, generators, callbacks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RunDirectoryError
from ..storage.arrays import Arrays
from ..sync.synchroniser import SyncedState, Synchroniser
from ..typed_json import JsonObject
from .model_state import Variable, separate_seed

if TYPE_CHECKING:
    from ..training.trainee import Hooks, Trainee

# Generators of Python and NumPy, which start equal on all ranks.
_COMMON_GENERATORS = ("python", "numpy")

# Merge of a metric's variable, for another number of ranks, that joins the ranks' arrays.
JOIN = "join"
# Bytes of the largest array of a callback that is saved for every rank.
SMALL = 64 * 1024


@dataclass(frozen=True)
class RankState:
    """The state of one rank.

    Attributes:
        values: what is JSON: ``random``, ``callbacks``, ``trained_by`` (see `TrainingVariables`)
            where each rank has its optimizers and, within an epoch, the names of ``metrics``.
        arrays: ``seed/…``, ``metric/…``, ``random/…``, ``sync/…`` (the strategy's state),
            ``variable/…`` (variables that differ from rank 0's) and ``callback/…`` (large ones of
            rank 0 only).
    """

    values: JsonObject
    arrays: Arrays = field(repr=False)

    def group(self, name: str) -> Arrays:
        """Return the arrays whose names begin with ``name/``, without it."""
        prefix = f"{name}/"
        return {k.removeprefix(prefix): a for k, a in self.arrays.items() if k.startswith(prefix)}


def capture_rank(
    trainee: Trainee,
    hooks: Hooks,
    synchroniser: Synchroniser,
    *,
    rank: int,
    in_epoch: bool,
) -> RankState:
    """Return a copy of this rank's state.

    Args:
        trainee: its model.
        hooks: its callbacks.
        synchroniser: its strategy.
        rank: its number.
        in_epoch: whether an epoch is unfinished: the sums of metrics count within one only.
    """
    random_values, random_arrays = capture_random(trainee.generators())
    callback_values, callback_arrays = hooks.capture()
    groups = {
        "seed": _capture_numbered(trainee.variables.seeds),
        "metric": _capture_numbered(trainee.metric_variables()) if in_epoch else {},
        "random": random_arrays,
        "sync": synchroniser.capture(rank),
        "variable": {} if rank == 0 else _unshared_variables(trainee, synchroniser),
        # Large arrays (best weights) are equal on all ranks: rank 0 saves them.
        "callback": {
            name: array
            for name, array in callback_arrays.items()
            if rank == 0 or array.nbytes <= SMALL
        },
    }
    arrays = {f"{group}/{name}": a for group, part in groups.items() for name, a in part.items()}
    values: JsonObject = {"random": random_values, "callbacks": callback_values}
    if synchroniser.synced_state is not SyncedState.EVERYTHING:
        values["trained_by"] = trainee.variables.trained_by()
    if in_epoch:
        values["metrics"] = trainee.metric_names()
        values["merges"] = trainee.metric_merges()
    return RankState(values, arrays)


def _unshared_variables(trainee: Trainee, synchroniser: Synchroniser) -> Arrays:
    """Return what is not as on rank 0: optimizers, where ranks share weights only."""
    if synchroniser.synced_state is SyncedState.EVERYTHING:
        return {}
    captured = trainee.variables.capture()
    return {name: array for name, array in captured.items() if not name.startswith("model/")}


def restore_hooks(state: RankState, hooks: Hooks) -> None:
    """Bring this rank's callbacks to ``state``."""
    hooks.restore(state.values["callbacks"], state.group("callback"))


def restore_rank(
    state: RankState, trainee: Trainee, hooks: Hooks | None, synchroniser: Synchroniser
) -> None:
    """Bring this rank to ``state``; metrics only where they are in it.

    Args:
        state: the state.
        trainee: the model.
        hooks: its callbacks; ``None`` if they were restored before.
        synchroniser: its strategy.

    Raises:
        RunDirectoryError: the model has other metrics now.
    """
    apart = synchroniser.synced_state is not SyncedState.EVERYTHING
    if apart:  # a weight that no row of this rank has used may have no moments here
        trained_by = state.values.get("trained_by", ())
        trainee.variables.build_optimizers([weights or [] for weights in trained_by])
    if hooks is not None:
        restore_hooks(state, hooks)
    variables = state.group("variable")
    if apart:
        named = trainee.variables.named
        for name, value in variables.items():
            named[name].assign(value)
    _assign_numbered(trainee.variables.seeds, state.group("seed"))
    metrics = state.group("metric")
    if metrics:
        metric_variables = trainee.metric_variables()
        merges = trainee.metric_merges()
        shapes = [metrics[name].shape for name in sorted(metrics)]
        fits = len(metric_variables) == len(shapes) and all(
            merge == JOIN or tuple(variable.shape) == shape
            for variable, merge, shape in zip(metric_variables, merges, shapes, strict=True)
        )
        if not fits:
            raise RunDirectoryError(
                "the checkpoint was taken within an epoch by a model compiled with other metrics "
                f"({_listed(state.values.get('metrics'))}, now "
                f"{_listed(trainee.metric_names())}); compile it with the same "
                "ones, and change them when that epoch is over"
            )
        _assign_numbered(metric_variables, metrics)
    synchroniser.restore(state.group("sync"))
    restore_random(state.values["random"], state.group("random"), trainee.generators())


def _listed(names: list[str] | None) -> str:
    return "unknown" if names is None else ", ".join(names) or "none"


def state_for(states: list[RankState], rank: int, size: int) -> RankState:
    """Return the state that ``rank`` of ``size`` continues with. Pure.

    With another number of ranks, sums of metrics are added up on rank 0; means over ranks become
    the mean of all, rank 0's values stay, and joinable arrays are joined. Of the strategy's state,
    terms of a sum over the ranks are added up on rank 0.

    A new rank takes rank 0's generators of Python and NumPy and the shared part of the strategy's
    state. Its random layers get separate streams; the framework's generators stay as they started.
    """
    first = states[0]
    source = states[rank] if rank < len(states) else first
    ours = source.arrays
    if rank >= len(states):
        ours = {n: a for n, a in ours.items() if not n.startswith("sync/") and not _is_stream(n)}
    of_all = {n: a for n, a in first.arrays.items() if n.startswith("sync/shared/")}
    of_callbacks = {n: a for n, a in first.arrays.items() if n.startswith("callback/")}
    arrays = {**of_callbacks, **ours, **of_all}
    if size != len(states):
        metrics = sorted(name for name in first.arrays if name.startswith("metric/"))
        merges = first.values.get("merges", ["sum"] * len(metrics))
        for name, merge in zip(metrics, merges, strict=True):
            arrays[name] = _merged([state.arrays[name] for state in states], merge, rank)
        for name in {n for state in states for n in state.arrays if n.startswith("sync/sum/")}:
            parts = [state.arrays[name] for state in states if name in state.arrays]
            arrays[name] = _merged(parts, "sum", rank)
        if rank >= len(states):
            for name, array in first.arrays.items():
                if name.startswith("seed/"):
                    arrays[name] = separate_seed(array, rank)
    return RankState(source.values, arrays)


def _is_stream(name: str) -> bool:
    """Return whether an array is a generator that has a separate stream on each rank."""
    group, _, generator = name.partition("/")
    return group == "random" and generator not in _COMMON_GENERATORS


def _merged(parts: list[np.ndarray], merge: str, rank: int) -> np.ndarray:
    """Return the part of a metric's variable for ``rank``, so that nothing is lost."""
    first = parts[0]
    if merge == "first":
        return first
    if merge == "mean":
        return np.asarray(np.mean(parts, axis=0), first.dtype)
    if merge == JOIN:
        return np.concatenate(parts) if rank == 0 else first[:0]
    total = np.asarray(np.sum(parts, axis=0), first.dtype)
    return total if rank == 0 else np.zeros_like(total)


def join_states(states: list[RankState]) -> Arrays:
    """Return the arrays of all ranks, with the rank before each name."""
    return {
        f"{rank:05d}/{name}": array
        for rank, state in enumerate(states)
        for name, array in state.arrays.items()
    }


def split_states(values: list[JsonObject], arrays: Arrays) -> list[RankState]:
    """Return the states that `join_states` joined, in the order of ranks."""
    states = [RankState(value, {}) for value in values]
    for name, array in arrays.items():
        rank, _, rest = name.partition("/")
        states[int(rank)].arrays[rest] = array
    return states


def _capture_numbered(variables: Sequence[Variable]) -> Arrays:
    """Return copies of the values, by their number."""
    return {f"{number:05d}": np.array(v.numpy()) for number, v in enumerate(variables)}


def _assign_numbered(variables: Sequence[Variable], arrays: Arrays) -> None:
    """Assign the values that `_capture_numbered` returned."""
    for number, variable in enumerate(variables):
        variable.assign(arrays[f"{number:05d}"])


def capture_random(framework_states: Mapping[str, Variable]) -> tuple[JsonObject, Arrays]:
    """Return the state of all global generators of this process.

    Args:
        framework_states: the states of the framework's generators, by name.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }
    arrays = {"python": np.array(words, np.uint32), "numpy": np.array(keys)}
    arrays.update({name: np.array(variable.numpy()) for name, variable in framework_states.items()})
    return state, arrays


def restore_random(
    state: JsonObject, arrays: Arrays, framework_states: Mapping[str, Variable]
) -> None:
    """Restore all global generators to a state that `capture_random` returned.

    Generators of the framework that it lacks are unchanged.
    """
    version, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in arrays["python"]), gauss))
    kind, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, arrays["numpy"], position, has_gauss, cached))
    for name, variable in framework_states.items():
        if name in arrays:
            variable.assign(arrays[name])
