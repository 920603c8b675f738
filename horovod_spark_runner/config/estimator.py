"""Settings of `HorovodEstimator`, under Spark ML's names; `run_training` has other ones."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from ..errors import InvalidInputError, brief
from .data import DataOptions
from .fields import (
    Settings,
    check_setting_names,
    default_of,
    from_table,
    parse_settings,
    setting,
)
from .importable import UserSettings, by_import_name, is_import_name
from .launch import LaunchOptions, MpiOptions
from .sync import (
    KIND_KEY,
    STRATEGIES,
    Allreduce,
    Sync,
    check_sync,
    plain_settings,
    strategy_class,
    strategy_name,
)
from .training import CheckpointOptions, MlflowOptions, RestartOptions
from .validators import PLACE, TEXT, ColumnNames, Kind, check_columns, optional

_BY_NAME = 'given as itself or by its name, ``"package.module:name"``, which can be saved'


def _check_code(name: str, value: object) -> object:
    if not callable(value) and not is_import_name(value):
        raise InvalidInputError(
            f'{name} must be a function, or name one as "package.module:function", got '
            f"{brief(value)}"
        )
    return value


def _check_model(name: str, value: object) -> object:
    if callable(value):
        return value
    if isinstance(value, (str, os.PathLike)) and value != "":
        return os.fspath(value)
    raise InvalidInputError(
        f'{name} must be a function that returns a compiled model, name one as "package.module:'
        f'function", or be the path of a .keras or .json file, got {brief(value)}'
    )


def _check_callbacks(name: str, value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return _check_code(name, value)


def _check_objects(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidInputError(f"{name} must be a dictionary by name, got {brief(value)}")
    return {key: _check_code(f"{name}[{key!r}]", one) for key, one in value.items()}


def _check_arguments(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidInputError(
            f"{name} must be a dictionary of arguments by name, got {brief(value)}"
        )
    return {key: plain_json(f"{name}[{key!r}]", one) for key, one in value.items()}


def plain_json(name: str, value: object) -> object:
    """Return ``value`` as JSON: plain numbers, text, lists and dictionaries by text.

    Raises:
        InvalidInputError: it is invalid.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if type(value).__name__ == "bool" and hasattr(value, "item"):  # NumPy's
        return bool(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain_json(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain_json(f"{name}[{number}]", one) for number, one in enumerate(value)]
    advice = ""
    if callable(value):
        advice = "; give text by which modelFn chooses it, or choose between functions as modelFn"
    raise InvalidInputError(
        f"{name} must be a finite number, text, or a list or dictionary of these, got "
        f"{brief(value)} of type {type(value).__name__}{advice}"
    )


def _settings_of(cls: type[Settings]) -> Kind[Mapping[str, object]]:
    """Return the kind of dictionaries of a class's settings, or objects of it."""

    def check(name: str, value: object) -> dict[str, Any]:
        values = _as_dictionary(name, value, cls)
        # Functions by name are imported where they are needed.
        made = _make(cls, name, {**values, **_only_functions(values)})
        return {one: _plain(name, values[one], getattr(made, one)) for one in values}

    return Kind(f"dictionary of settings of `{cls.__name__}`", check)


def _as_dictionary(name: str, value: object, cls: type[Settings]) -> dict[str, object]:
    settings = {one.name: one for one in fields(cls)}
    if type(value) is cls:
        values = {one: getattr(value, one) for one in settings}
        return {one: values[one] for one in settings if values[one] != default_of(settings[one])}
    if not isinstance(value, Mapping):
        raise InvalidInputError(
            f"{name} must be {cls.__name__}(…) or a dictionary of its settings, got an object of "
            f"type {type(value).__name__}"
        )
    check_setting_names(cls, name, value)
    return dict(value)


def _only_functions(values: Mapping[str, Any]) -> dict[str, object]:
    transforms = values.get("transforms")
    if not isinstance(transforms, Mapping):
        return {}
    return {"transforms": {c: one for c, one in transforms.items() if not is_import_name(one)}}


def _make(cls: type[Settings], name: str, values: Mapping[str, Any]) -> Settings:
    nested = values.get("mpi")
    if isinstance(nested, Mapping):
        values = {
            **values,
            "mpi": _make(MpiOptions, "mpi", _as_dictionary(f"{name}['mpi']", nested, MpiOptions)),
        }
    return cls(**values)


def _plain(name: str, value: Any, checked: object) -> object:
    if isinstance(checked, Settings):
        return _as_dictionary(name, checked, type(checked))
    if isinstance(checked, os.PathLike):
        return os.fspath(checked)
    if isinstance(checked, Mapping):
        return {**value, **{key: _plain(name, value, one) for key, one in checked.items()}}
    return list(checked) if isinstance(checked, tuple) else checked


def _check_strategy(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        strategy = check_sync(name, value)
        plain = plain_settings(strategy)
        return {
            KIND_KEY: strategy_name(strategy),
            **{one: plain[one] for one in _as_dictionary(name, strategy, type(strategy))},
        }
    parse_strategy(name, value)
    return dict(value)


_SYNC: Kind[Mapping[str, Any]] = Kind("dictionary of a strategy and its settings", _check_strategy)


def parse_strategy(name: str, values: Mapping[str, Any]) -> Sync:
    """Return the strategy that a dictionary describes.

    Args:
        name: the Param, for messages.
        values: settings, and the strategy's name as ``way``.

    Raises:
        InvalidInputError: the strategy or a setting is unknown, or a setting is invalid.
    """
    cls = strategy_class(name, values)
    others = [
        strategy
        for strategy, each in STRATEGIES.items()
        if set(values) <= {one.name for one in fields(each)}
    ]
    if KIND_KEY not in values and others and strategy_name(Allreduce()) not in others:
        raise InvalidInputError(
            f"{name}={brief(values)} does not name its strategy; give {KIND_KEY!r}, one of "
            f"{', '.join(map(repr, others))}"
        )
    return parse_settings(
        cls, name, {one: each_value for one, each_value in values.items() if one != KIND_KEY}
    )


def parse_options(cls: type[Settings], name: str, value: Mapping[str, Any]) -> Any:
    """Return the options that a Param's dictionary describes, with its functions imported.

    Args:
        cls: their class.
        name: the Param, for messages.
        value: its value.

    Raises:
        InvalidInputError: a function cannot be imported, or storage decides what ranks run with.
    """
    values = dict(value)
    if not isinstance(value, UserSettings):
        mpi = values.get("mpi") or {}
        runs_code = [*values.get("env", ()), *mpi.get("parameters", ())]
        if runs_code:
            raise InvalidInputError(
                f"{name} comes from storage, or a plain map as storage may hold, which must not "
                f"decide what ranks run with ({', '.join(runs_code)}): give it once more by "
                f"set{name[:1].upper()}{name[1:]}(…) or a ParamGridBuilder"
            )
    if "transforms" in values:
        values["transforms"] = {
            column: by_import_name(f"{name}['transforms'][{column!r}]", one)
            if is_import_name(one)
            else one
            for column, one in values["transforms"].items()
        }
    return _make(cls, name, values)


def _check_label_columns(name: str, value: object) -> ColumnNames:
    return check_columns(name, value, may_lack=True)


def _check_fraction(name: str, value: object) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.0
    if not 0 < number < 1:
        raise InvalidInputError(f"{name} must be a fraction between 0 and 1, got {brief(value)}")
    return number


_LABELS: Kind[ColumnNames] = Kind("columns, by output or in their order", _check_label_columns)
_FRACTION: Kind[float] = Kind("number between 0 and 1", _check_fraction, "toFloat", float)


@from_table
@dataclass(frozen=True, kw_only=True)
class EstimatorSettings(Settings):
    """Settings of `HorovodEstimator`: model, columns, folders and options."""

    model_fn: Any = setting(
        None,
        optional(Kind("function, its import name, or path", _check_model)),
        "function that returns a compiled ``keras.Model`` or a `TorchModel`, called on every "
        f"worker with ``modelArgs``; {_BY_NAME}. Or the path or URL of a ``.keras`` file, or of "
        "the ``.json`` of a compiled model. Required.",
    )
    model_args: Mapping[str, object] = setting(
        {},
        Kind("dictionary of arguments by name", _check_arguments),
        "arguments of ``modelFn`` by name, such as a grid searches over: numbers, text, and lists "
        "and dictionaries of these.",
    )
    custom_objects: Mapping[str, object] = setting(
        {},
        Kind("dictionary of functions and classes by name", _check_objects),
        f"the model's own classes and functions by name, for a model file; each {_BY_NAME}.",
    )
    callbacks: object = setting(
        None,
        optional(Kind("function, or list of callbacks", _check_callbacks)),
        "function, called on each worker, that returns Keras callbacks, or `TorchCallback` for a "
        f"PyTorch module; {_BY_NAME}. Or a list of callbacks that can be pickled, which cannot be "
        "saved.",
    )
    initial_weights: str | os.PathLike[str] | None = setting(
        None,
        optional(PLACE),
        "weights to begin with: another run's directory or one of its checkpoints; or, for a Keras "
        "model, a ``.keras`` or ``.weights.h5`` file or a SavedModel written by Keras; for a "
        "PyTorch module, a ``.pt`` or ``.pth`` file of ``torch.save(module.state_dict())``.",
    )
    label_col: str | None = setting(
        "label",
        optional(TEXT),
        'column that the model\'s output is compared with ("label"; if there is no such column, '
        "and it was not set, none: for a model that needs no labels).",
    )
    label_cols: ColumnNames | None = setting(
        None,
        optional(_LABELS),
        "label columns of a model with several outputs: a list, in their order, or a dictionary "
        "from output to column.",
    )
    weight_col: str | None = setting(
        None,
        optional(TEXT),
        "column of weights of the rows in the loss, none of them negative; none by default.",
    )
    validation_indicator_col: str | None = setting(
        None,
        optional(TEXT),
        "column that is true or 1 for rows to validate with, and false or 0 for the others; none "
        "by default.",
    )
    validation_fraction: float | None = setting(
        None,
        optional(_FRACTION),
        "fraction of the rows to validate with, in place of ``validationIndicatorCol``.",
    )
    run_dir: str | os.PathLike[str] | None = setting(
        None,
        optional(PLACE),
        "folder or URL, reached by the driver and all executors, in which each fit gets a run "
        "directory of its own. On a ``local`` master ``runs`` by default; required elsewhere.",
    )
    resume_from: str | os.PathLike[str] | None = setting(
        None,
        optional(PLACE),
        "run directory of an earlier fit on the same rows, which is resumed from its newest "
        "checkpoint: after an interruption, or to train for more ``epochs``.",
    )
    data: Mapping[str, object] = setting(
        {}, _settings_of(DataOptions), "see `DataOptions`, as a dictionary of its settings."
    )
    checkpoints: Mapping[str, Any] = setting(
        {}, _settings_of(CheckpointOptions), "see `CheckpointOptions`, likewise."
    )
    restarts: Mapping[str, object] = setting(
        {}, _settings_of(RestartOptions), "see `RestartOptions`, likewise."
    )
    launch: Mapping[str, Any] = setting(
        {}, _settings_of(LaunchOptions), "see `LaunchOptions`, likewise.", shown=False
    )
    sync: Mapping[str, Any] = setting(
        {},
        _SYNC,
        'see `Allreduce`, likewise; ``{"way": "local_sgd"}``, ``{"way": "diloco"}`` and '
        '``{"way": "async_server"}``, with their settings, are `LocalSGD`, `DiLoCo` and '
        "`AsyncServer`.",
    )
    mlflow: Mapping[str, Any] | None = setting(
        None,
        optional(_settings_of(MlflowOptions)),
        "see `MlflowOptions`, likewise: ``{}`` logs every fit to MLflow, by its defaults; "
        "``None`` (default) does not.",
        shown=False,
    )
