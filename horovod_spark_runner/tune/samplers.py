"""Samplers and pruners of optuna."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import optuna

from ..config.validators import check_choice
from ..errors import EnvironmentProblem, InvalidInputError
from .space import Dimension, Space

SamplerName = Literal["tpe", "random", "grid"]
PrunerName = Literal["median", "asha", "hyperband"]
# Of a grid, whose combinations optuna lists again for each trial: a tenth of a second for so many.
_MOST_POINTS = 100_000
# Packages that some of optuna's classes import once they are used, perhaps after several trials.
_NEEDS = {
    "CmaEsSampler": ("cmaes",),
    "GPSampler": ("scipy", "torch"),
    "QMCSampler": ("scipy",),
    "WilcoxonPruner": ("scipy",),
}


def check_sampler(sampler: Any, space: Space) -> None:
    """Check the ``sampler`` argument of `tune`.

    Raises:
        InvalidInputError: it is none, or cannot choose from the space.
        EnvironmentProblem: it needs a package that is not installed.
    """
    if isinstance(sampler, optuna.samplers.BaseSampler):
        _check_installed("sampler", sampler)
    elif check_choice("sampler", sampler, get_args(SamplerName)) == "grid":
        _grid_of(space)


def _grid_of(space: Space) -> dict[str, list[Any]]:
    """Return the values of every parameter of a space that has finitely many.

    Raises:
        InvalidInputError: it has not, or there are too many combinations of them.
    """
    if not isinstance(space, Mapping):
        raise InvalidInputError(
            "sampler='grid' needs a space of choice(…) and integer(…) by name, got a function"
        )
    size = math.prod(_count_of(name, one) for name, one in space.items())
    if size > _MOST_POINTS:
        raise InvalidInputError(
            f"sampler='grid' was given a grid of {size:,} combinations ("
            + ", ".join(f"{name!r}: {one.count:,} values" for name, one in space.items())
            + f"); it takes at most {_MOST_POINTS:,}: name the values to try by choice(…), or use "
            "sampler='random'"
        )
    return {name: list(one.points or ()) for name, one in space.items()}


def _count_of(name: str, one: Dimension) -> int:
    if one.count is None:
        raise InvalidInputError(
            f"sampler='grid' takes every value of choice(…) and integer(…), but {name!r} is {one}; "
            "name the values to try by choice(…), or use sampler='random'"
        )
    return one.count


def sampler_for(
    sampler: Any, space: Space, seed: int, number: int, *, side_by_side: bool
) -> optuna.samplers.BaseSampler:
    """Return the sampler of one trial; one by name draws the same in a resumed study.

    Args:
        sampler: its name, or one of optuna's.
        space: what it chooses from.
        seed: seed of the search.
        number: the trial's.
        side_by_side: whether several trials run at once.
    """
    if isinstance(sampler, optuna.samplers.BaseSampler):
        return sampler
    if sampler == "grid":  # whose order, by its seed, must be the same for all trials
        return optuna.samplers.GridSampler(_grid_of(space), seed=seed)
    trial_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    if sampler == "random":
        return optuna.samplers.RandomSampler(seed=trial_seed)
    return optuna.samplers.TPESampler(seed=trial_seed, constant_liar=side_by_side)


def is_grid_started(trials: list[optuna.trial.FrozenTrial]) -> bool:
    """Return whether a trial has begun for every point of the last trial's grid.

    Optuna's own word for it counts those that have ended, so that others, at once, would be given
    points that are being tried.
    """
    grid = trials[-1].system_attrs.get("search_space") if trials else None
    if grid is None:
        return False
    points = {
        one.system_attrs["grid_id"]
        for one in trials
        if one.system_attrs.get("search_space") == grid and "grid_id" in one.system_attrs
    }
    return len(points) >= math.prod(map(len, grid.values()))


def make_pruner(pruner: Any, epochs: int | None) -> optuna.pruners.BasePruner:
    """Return the requested pruner.

    Args:
        pruner: its name, one of optuna's, or ``None``.
        epochs: epochs of every trial; ``None`` if they are searched.

    Raises:
        InvalidInputError: it is none, or trials have one epoch.
        EnvironmentProblem: it needs a package that is not installed.
    """
    if pruner is None:
        return optuna.pruners.NopPruner()
    if not isinstance(pruner, optuna.pruners.BasePruner):
        check_choice("pruner", pruner, get_args(PrunerName))
    if epochs == 1:
        raise InvalidInputError(
            f"pruner={pruner!r} ends trials after an epoch, but they have one: epochs=1"
        )
    if isinstance(pruner, optuna.pruners.BasePruner):
        _check_installed("pruner", pruner)
        return pruner
    match pruner:
        case "median":
            return optuna.pruners.MedianPruner()
        case "asha":
            return optuna.pruners.SuccessiveHalvingPruner()
        case _:
            return optuna.pruners.HyperbandPruner(max_resource="auto" if epochs is None else epochs)


def _check_installed(what: str, component: object) -> None:
    name = type(component).__name__
    needs = _NEEDS.get(name, ()) if type(component).__module__.startswith("optuna.") else ()
    missing = [one for one in needs if importlib.util.find_spec(one) is None]
    if missing:
        raise EnvironmentProblem(
            f"{what}={name}(…) needs {' and '.join(missing)}, which is not installed: pip install "
            f"{' '.join(missing)}"
        )
