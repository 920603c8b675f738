"""Spark ML's Params of trained models and of the estimator, made from the tables of settings.

`_with_params` makes a Param, a getter and a setter of each; check, converter and text are the
table's. Setters check at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from ..config.estimator import EstimatorSettings
from ..config.fields import Settings, default_of, kind_of, text_of
from ..config.importable import copy_user_mark, mark_user_settings, replace_by_names
from ..config.launch import LaunchSettings
from ..config.prediction import PredictionSettings
from ..config.training import FitOptions
from ..errors import InvalidInputError, brief

P = TypeVar("P", bound="_StageParams")
# Settings in the texts of others, and those whose Params have another name: Spark ML's.
_SETTING = re.compile(r"``([a-z]+(?:_[a-z]+)+)``")
_RENAMED = {"sample_weight_col": "weightCol"}


@dataclass(frozen=True)
class Converter:
    """Converts a user's value to a Param's value; can be pickled.

    Attributes:
        settings: the class that has the setting.
        name: the setting.
    """

    settings: type[Settings]
    name: str

    def __call__(self, value: object) -> Any:
        """Return ``value`` as JSON can hold it, or raise `InvalidInputError`.

        Functions are given by their names, where they have some: what grids are made of can be
        saved with a search.
        """
        return replace_by_names(mark_user_settings(self.checked(value)))

    def checked(self, value: object) -> Any:
        """Return ``value`` as a Param keeps it, functions as themselves.

        Raises:
            InvalidInputError: it cannot be right.
        """
        kind = kind_of(_field(self.settings, self.name))
        if kind.converter == "toInt" and isinstance(value, float) and value.is_integer():
            value = int(value)  # as Spark's own converter does
        checked = kind.check(camel_case(self.name), value)
        if checked is None:
            return None
        if isinstance(checked, os.PathLike):
            checked = os.fspath(checked)
        return getattr(TypeConverters, kind.converter)(copy_user_mark(value, checked))


def _convert(one: Param[Any], value: object) -> Any:
    """Return a value as a stage keeps it; that of another stage's Param as it is."""
    convertible = isinstance(one.typeConverter, Converter) and value is not None
    return one.typeConverter.checked(value) if convertible else value


def _param(settings: type[Settings], name: str) -> Param[Any]:
    """Return the Param of a setting, to be an attribute of a class of Params.

    Args:
        settings: the class that has the setting.
        name: the setting, in snake_case; the Param, and the attribute, are the same in camelCase.
    """
    text = _param_text(text_of(_field(settings, name)))
    return Param(Params._dummy(), camel_case(name), text, Converter(settings, name))


def _param_text(text: str) -> str:
    """Return a setting's description, with the Params' names of other settings."""
    return _SETTING.sub(lambda m: _RENAMED.get(m[1], camel_case(m[1])), text).replace("``", "")


def camel_case(name: str) -> str:
    """Return the Spark ML name of a setting: ``featureCols`` for ``feature_cols``."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def setters() -> dict[str, str]:
    """Return how to set each prediction setting of a transformer that is loaded already."""
    names = (one.name for one in fields(PredictionSettings))
    return {name: f"set{camel_case(f'_{name}')}(…) of the transformer" for name in names}


def _set_defaults(stage: Params, settings: type[Settings]) -> None:
    """Set the Params of a stage to the defaults of the table.

    Args:
        stage: has Params of some of these settings.
        settings: the class that has them.
    """
    for one in fields(settings):
        name = camel_case(one.name)
        if stage.hasParam(name):
            stage._setDefault(**{name: default_of(one)})


def set_params(stage: Params, settings: Settings) -> None:
    """Set the Params of a stage whose settings are not the default.

    Args:
        stage: has a Param for each setting.
        settings: what to set.
    """
    for one in fields(settings):
        value = getattr(settings, one.name)
        if value != default_of(one):
            stage._set(**{camel_case(one.name): value})


def prediction_settings(stage: PredictionParams) -> PredictionSettings:
    """Return a stage's Params as prediction settings.

    Raises:
        InvalidInputError: they contradict each other.
    """
    values = {
        one.name: stage.getOrDefault(camel_case(one.name)) for one in fields(PredictionSettings)
    }
    # Spark ML's default for it, which a stage may have, is no wish.
    if not stage.isSet("featuresCol"):
        values["features_col"] = None
    return PredictionSettings(**values)


def _check_params(param_map: Mapping[object, object]) -> None:
    """Check that a map goes from Params of stages to values.

    Raises:
        InvalidInputError: a key is something else, and would have no effect.
    """
    for key in param_map:
        if not isinstance(key, Param):
            raise InvalidInputError(
                f"invalid key {brief(key)}; a map goes from Params to values, such as "
                f"{{stage.{key if isinstance(key, str) else 'predictionCol'}: …}}"
            )
        if key.parent == Params._dummy().uid:
            raise InvalidInputError(
                f"{key.name} is given as the Param of a class; give the stage's own, "
                f"{{stage.{key.name}: …}}"
            )


def check_stage_params(stage: Params, param_map: object) -> None:
    """Check that a map holds Params of ``stage`` only: others would have no effect.

    A model has its estimator's uid, and searches give it the estimator's maps, too.

    Raises:
        InvalidInputError: it does not, or is no map.
    """
    if not isinstance(param_map, Mapping):
        raise InvalidInputError(f"a map from Params to values is needed, got {brief(param_map)}")
    _check_params(param_map)
    for key in param_map:
        if key.parent != stage.uid:
            raise InvalidInputError(f"{key} is a Param of another stage; this one is {stage.uid}")


def _field(settings: type[Settings], name: str) -> Field[Any]:
    return settings.__dataclass_fields__[name]


def _with_params(
    settings: type[Settings], *names: str
) -> Callable[[type[_StageParams]], type[_StageParams]]:
    """Return a class decorator that adds the Params of settings, with getters and setters.

    Args:
        settings: the class that has the settings.
        names: those to add; by default, all of its fields.
    """

    def decorate(cls: type[_StageParams]) -> type[_StageParams]:
        for name in names or [one.name for one in fields(settings)]:
            title = camel_case(name)[:1].upper() + camel_case(name)[1:]
            setattr(cls, camel_case(name), _param(settings, name))
            setattr(cls, f"get{title}", _getter(cls, camel_case(name), f"get{title}"))
            setattr(cls, f"set{title}", _setter(cls, camel_case(name), f"set{title}"))
        return cls

    return decorate


def _getter(cls: type, name: str, method: str) -> Callable[[_StageParams], Any]:
    def get(self: _StageParams) -> Any:
        return self.getOrDefault(name)

    get.__name__, get.__qualname__ = method, f"{cls.__qualname__}.{method}"
    get.__doc__ = f"Return the value of ``{name}``, or its default."
    return get


def _setter(cls: type, name: str, method: str) -> Callable[[P, object], P]:
    def set_to(self: P, value: object) -> P:
        return self._assign(name, value)

    set_to.__name__, set_to.__qualname__ = method, f"{cls.__qualname__}.{method}"
    set_to.__doc__ = f"Set ``{name}``, or with None reset it, and return this stage."
    return set_to


class _StageParams(Params):  # type: ignore[misc]
    """Params of a stage whose settings come from tables."""

    def _assign(self: P, name: str, value: object) -> P:
        """Set a Param; None resets it to its default."""
        if value is None:
            self.clear(self.getParam(name))
        else:
            self._set(**{name: value})
        return self


@_with_params(PredictionSettings)
class PredictionParams(_StageParams):
    """Params of a model's input and output columns."""

    def __init__(self) -> None:
        super().__init__()
        _set_defaults(self, PredictionSettings)

    def copy(self: P, extra: Mapping[object, object] | None = None) -> P:
        """Return a copy with other values of some Params; may be called by several threads.

        Args:
            extra: values by Param; those of other stages' Params are left out.

        Raises:
            InvalidInputError: a key is no stage's Param, or a value cannot be right.
        """
        _check_params(extra or {})
        values = {one: _convert(one, value) for one, value in (extra or {}).items()}
        copied: P = super().copy(values)
        # Spark's copy shares the defaults, which a caller of a getter may change.
        defaults = {
            one: copy_user_mark(value, value) for one, value in copied._defaultParamMap.items()
        }
        copied._defaultParamMap = defaults
        return copied


@_with_params(EstimatorSettings)
@_with_params(LaunchSettings, "num_workers", "gpus_per_worker", "stream_logs")
@_with_params(FitOptions)
class EstimatorParams(PredictionParams):
    """Params of the estimator: its training, and its model's columns."""

    def __init__(self) -> None:
        super().__init__()
        for settings in (EstimatorSettings, FitOptions, LaunchSettings):
            _set_defaults(self, settings)
        self._setDefault(featuresCol="features")

    def _set(self, **values: object) -> EstimatorParams:
        # Converters name functions, for grids; a stage keeps what it was given.
        for name, value in values.items():
            one = self.getParam(name)
            self._paramMap[one] = _convert(one, value)
        return self

    def _assign(self: P, name: str, value: object) -> P:
        super()._assign(name, value)
        one = self.getParam(name)
        if one in self._paramMap:
            self._paramMap[one] = mark_user_settings(self._paramMap[one])
        return self
