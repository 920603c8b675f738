"""Configure the training of a trial: arguments of `tune`, and the parameters of the trial."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..api import run_training
from ..config.data import DataOptions
from ..config.fields import Settings, kind_of
from ..config.importable import explain_misfit
from ..config.launch import LaunchSettings, MpiOptions
from ..config.sync import STRATEGIES, Allreduce, as_json, check_sync
from ..config.training import OPTIONS, FitOptions, MlflowOptions, RestartOptions, TrainingConfig
from ..config.validators import Kind
from ..data.prepare.datasets import frame_of
from ..errors import InvalidInputError, ModelError
from ..storage.filesystem import Location
from ..training.spec import FEATURES
from .space import Space

# Arguments of `run_training` that a search decides, or that mean nothing to a function's model.
_SEARCH_SETTINGS = ("df", "model_fn", "num_workers", "run_dir", "resume", "seed", "stream_logs")
_UNUSED = ("custom_objects",)
# Arguments of `tune` itself, which are the same for all trials.
_OF_SEARCH = (
    *("space", "metric", "direction", "max_trials", "parallel", "workers_per_trial"),
    *("sampler", "pruner", "study_dir"),
)
# A trial that failed for reasons outside its code is retried once.
_RESTARTS = RestartOptions(max_restarts=1)
# Settings of the table that a space may name: where they belong. Those of `FitOptions` but
# ``seed``, which is the search's own, and ``validation_freq``, as trials are compared by epochs.
_SEARCHED: dict[str, tuple[str, type[Settings]]] = {
    **{
        one.name: ("fit", FitOptions)
        for one in fields(FitOptions)
        if one.name not in ("seed", "validation_freq")
    },
    "compression": ("sync", Allreduce),
    "window_bytes": ("data", DataOptions),
}
_TABLE = {
    one.name
    for cls in (FitOptions, LaunchSettings, MpiOptions, *OPTIONS.values(), *STRATEGIES.values())
    for one in fields(cls)
    if cls is not MlflowOptions
}


@dataclass(frozen=True)
class TrialConfigs:
    """Makes the configurations of trials.

    Attributes:
        df: the rows.
        base: configuration that all trials share.
        model_fn: makes the model of a trial's parameters.
    """

    df: object
    base: TrainingConfig
    model_fn: Callable[[dict[str, Any]], object]

    def config(self, params: Mapping[str, object], run_dir: Location) -> TrainingConfig:
        """Return the configuration of a trial.

        Args:
            params: its parameters; those that are called as a setting are set.
            run_dir: its run directory.

        Raises:
            InvalidInputError: a setting cannot be right.
        """
        groups: dict[str, dict[str, Any]] = {}
        for name, value in params.items():
            if name in _SEARCHED:
                groups.setdefault(_SEARCHED[name][0], {})[name] = value
        changed = {place: replace(getattr(self.base, place), **groups[place]) for place in groups}
        model = self.model_function(params)
        return replace(
            self.base, model_fn=model, run_dir=str(run_dir), params=dict(params), **changed
        )

    def model_function(self, params: Mapping[str, object]) -> Callable[[], object]:
        """Return the function without arguments that makes the model of a trial."""
        model_params = {name: value for name, value in params.items() if name not in _SEARCHED}
        return functools.partial(self.model_fn, model_params)


def trial_configs(
    df: object,
    model_fn: Any,
    training: Mapping[str, object],
    *,
    workers: int,
    seed: int,
    study_dir: Location,
) -> TrialConfigs:
    """Return the factory of trials' configurations.

    Args:
        df: the rows.
        model_fn: makes the model of a dictionary of parameters.
        training: arguments of `run_training` that all trials share.
        workers: ranks of a trial.
        seed: seed of the trainings.
        study_dir: the study's directory.

    Raises:
        ModelError: ``model_fn`` is no function of one argument.
        InvalidInputError: another argument cannot be right.
    """
    _check_model_fn(model_fn)
    arguments = {**shared_defaults(), "restarts": _RESTARTS, **training}
    if arguments["feature_cols"] is None and FEATURES not in frame_of(df).columns:
        raise InvalidInputError(
            f"feature_cols is not given and the DataFrame has no column {FEATURES!r}; a search "
            "needs feature_cols, as the models of its trials may name their inputs differently"
        )
    configs = TrialConfigs(
        df,
        TrainingConfig.from_arguments(
            {
                **arguments,
                "model_fn": functools.partial(model_fn, {}),
                "num_workers": workers,
                "run_dir": str(study_dir),
                "stream_logs": False,
                "seed": seed,
            }
        ),
        model_fn,
    )
    return replace(configs, base=replace(configs.base, model_fn=configs.model_function({})))


def shared_defaults() -> dict[str, object]:
    """Return the arguments of `run_training` that all trials share, and their defaults."""
    return {
        name: one.default
        for name, one in inspect.signature(run_training).parameters.items()
        if name not in (*_SEARCH_SETTINGS, *_UNUSED)
    }


def _check_model_fn(model_fn: object) -> None:
    if not callable(model_fn):
        raise ModelError(
            "model_fn must be a function that makes a compiled model of a dictionary of "
            f"parameters, got {model_fn!r}"
        )
    if wrong := explain_misfit(model_fn, {}):
        raise ModelError(f"model_fn is called with a dictionary of a trial's parameters: {wrong}")


def check_names(space: Space, training: Mapping[str, object]) -> None:
    """Check the settings in a space, as far as it is plain values.

    Raises:
        InvalidInputError: a name is that of a setting that cannot be searched or is given as well,
            or a setting cannot have such values.
    """
    if not isinstance(space, Mapping):
        return
    _check_param_names(space, training)
    for name, one in space.items():
        if name in _SEARCHED:
            for value in one.bounds:
                _kind(name).check(f"space[{name!r}]", value)


def checked_params(params: Mapping[str, object], training: Mapping[str, object]) -> dict[str, Any]:
    """Return a trial's parameters, with settings in their JSON form.

    Args:
        params: parameters by name; numbers of NumPy's become Python's.
        training: arguments of `run_training` that are given.

    Raises:
        InvalidInputError: a name is that of a setting that cannot be searched or is given as well,
            or a setting cannot have its value.
    """
    _check_param_names(params, training)
    checked: dict[str, object] = {}
    for name, value in params.items():
        value = value.item() if isinstance(value, np.generic) else value
        if name in _SEARCHED:
            value = _kind(name).check(f"{name} (of the space)", value)
            if name == "compression":
                value = as_json(value)
            if isinstance(value, Mapping):  # JSON has no other keys than text
                value = {str(key): one for key, one in value.items()}
        checked[name] = value
    return checked


def _kind(name: str) -> Kind[Any]:
    _, cls = _SEARCHED[name]
    return kind_of(cls.__dataclass_fields__[name])


def _check_param_names(names: Mapping[str, object], training: Mapping[str, object]) -> None:
    """Check that parameters called as settings are such as can be searched.

    Args:
        names: parameters by name.
        training: arguments of `run_training` that are given.

    Raises:
        InvalidInputError: one is not, or is given as well.
    """
    arguments = inspect.signature(run_training).parameters
    sync = check_sync("sync", training.get("sync"))
    for name in names:
        if name in training:
            raise InvalidInputError(f"{name!r} is in the space, and is given as {name}=… as well")
        if name in _SEARCHED and _SEARCHED[name][1] is Allreduce and type(sync) is not Allreduce:
            raise InvalidInputError(
                f"{name!r} in the space is a setting of Allreduce, and sync={sync} is given"
            )
        is_setting = name in _TABLE or name in arguments or name in _OF_SEARCH
        if is_setting and name not in _SEARCHED:
            raise InvalidInputError(
                f"{name!r} in the space is the name of a setting that cannot be searched; those "
                f"that can are {', '.join(_SEARCHED)}. A parameter of model_fn needs another name"
            )
