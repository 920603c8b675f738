"""Spark ML's Params of a model that predicts, made from the table of settings.

Each is one line, ``camelCase = param(<where the setting is>, "snake_case")``; its check, converter
and text are the table's. Setters check at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from ..config.fields import Settings, default_of, kind_of, text_of
from ..config.importable import copy_user_mark, mark_user_settings, replace_by_names
from ..config.prediction import (
    ClassCol,
    HandleInvalid,
    OutputForm,
    PredictionCol,
    PredictionSettings,
)
from ..config.validators import ColumnNames
from ..errors import InvalidInputError, brief

P = TypeVar("P", bound="Params")
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


def converted(one: Param[Any], value: Any) -> Any:
    """Return a value as a stage keeps it; that of another stage's Param as it is."""
    convertible = isinstance(one.typeConverter, Converter) and value is not None
    return one.typeConverter.checked(value) if convertible else value


def param(settings: type[Settings], name: str) -> Param[Any]:
    """Return the Param of a setting, to be an attribute of a class of Params.

    Args:
        settings: the class that has the setting.
        name: the setting, in snake_case; the Param, and the attribute, are the same in camelCase.
    """
    text = param_text(text_of(_field(settings, name)))
    return Param(Params._dummy(), camel_case(name), text, Converter(settings, name))


def param_text(text: str) -> str:
    """Return a setting's description, with the Params' names of other settings."""
    return _SETTING.sub(lambda m: _RENAMED.get(m[1], camel_case(m[1])), text).replace("``", "")


def camel_case(name: str) -> str:
    """Return the Spark ML name of a setting: ``featureCols`` for ``feature_cols``."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def set_defaults(stage: Params, settings: type[Settings]) -> None:
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


def _check_params(param_map: Mapping[Any, Any]) -> None:
    """Check that a map goes from Params of stages to values.

    Raises:
        InvalidInputError: a key is something else, and would have no effect.
    """
    for key in param_map:
        if not isinstance(key, Param):
            raise InvalidInputError(
                f"{brief(key)} is no Param; a map goes from Params to values, such as "
                f"{{stage.{key if isinstance(key, str) else 'predictionCol'}: …}}"
            )
        if key.parent == Params._dummy().uid:
            raise InvalidInputError(
                f"{key.name} is given as the Param of a class, which is no stage's; give the "
                f"stage's own, {{stage.{key.name}: …}}"
            )


def check_stage_params(stage: Params, param_map: Any) -> None:
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


def _field(settings: type[Settings], name: str) -> Any:
    return settings.__dataclass_fields__[name]


class FeatureParams(Params):  # type: ignore[misc]
    """Params of the columns that feed the model."""

    featuresCol: Param[str | None] = param(PredictionSettings, "features_col")
    featureCols: Param[ColumnNames | None] = param(PredictionSettings, "feature_cols")

    def getFeaturesCol(self) -> str | None:
        """Return the feature column; None if it was not named so."""
        value: str | None = self.getOrDefault(self.featuresCol)
        return value

    def setFeaturesCol(self: P, value: str | None) -> P:
        """Name the feature column of a model that takes one."""
        return _set(self, featuresCol=value)

    def getFeatureCols(self) -> ColumnNames | None:
        """Return the feature columns; None if they were not named."""
        value: ColumnNames | None = self.getOrDefault(self.featureCols)
        return value

    def setFeatureCols(self: P, value: ColumnNames | None) -> P:
        """Name the feature columns, in the order of the model's inputs or by their names."""
        return _set(self, featureCols=value)


class PredictionParams(FeatureParams):
    """Params of a model's input and output columns."""

    predictionCol: Param[PredictionCol] = param(PredictionSettings, "prediction_col")
    probabilityCol: Param[ClassCol] = param(PredictionSettings, "probability_col")
    rawPredictionCol: Param[ClassCol] = param(PredictionSettings, "raw_prediction_col")
    outputForm: Param[OutputForm] = param(PredictionSettings, "output_form")
    handleInvalid: Param[HandleInvalid] = param(PredictionSettings, "handle_invalid")
    predictBatchSize: Param[int] = param(PredictionSettings, "predict_batch_size")

    def __init__(self) -> None:
        super().__init__()
        set_defaults(self, PredictionSettings)

    def copy(self: P, extra: Mapping[Any, Any] | None = None) -> P:
        """Return a copy with other values of some Params; may be called by several threads.

        Args:
            extra: values by Param; those of other stages' Params are left out.

        Raises:
            InvalidInputError: a key is no stage's Param, or a value cannot be right.
        """
        _check_params(extra or {})
        values = {one: converted(one, value) for one, value in (extra or {}).items()}
        copied: P = super().copy(values)  # type: ignore[misc]
        # Spark's copy shares the defaults, which a caller of a getter may change.
        defaults = {
            one: copy_user_mark(value, value) for one, value in copied._defaultParamMap.items()
        }
        copied._defaultParamMap = defaults
        return copied

    def getPredictionCol(self) -> PredictionCol:
        """Return the names of the columns to add as they were given."""
        value: PredictionCol = self.getOrDefault(self.predictionCol)
        return value

    def setPredictionCol(self: P, value: PredictionCol) -> P:
        """Name the columns to add."""
        return _set(self, predictionCol=value)

    def getProbabilityCol(self) -> ClassCol:
        """Return the column for the probabilities of classes; None for none."""
        value: ClassCol = self.getOrDefault(self.probabilityCol)
        return value

    def setProbabilityCol(self: P, value: ClassCol) -> P:
        """Add the probabilities of classes, and predict the likeliest."""
        return _set(self, probabilityCol=value)

    def getRawPredictionCol(self) -> ClassCol:
        """Return the column for the scores of classes; None for none."""
        value: ClassCol = self.getOrDefault(self.rawPredictionCol)
        return value

    def setRawPredictionCol(self: P, value: ClassCol) -> P:
        """Add the scores of classes in this column, and predict the highest."""
        return _set(self, rawPredictionCol=value)

    def getOutputForm(self) -> OutputForm:
        """Return the form of outputs of several numbers."""
        value: OutputForm = self.getOrDefault(self.outputForm)
        return value

    def setOutputForm(self: P, value: OutputForm) -> P:
        """Set the form of outputs of several numbers."""
        return _set(self, outputForm=value)

    def getHandleInvalid(self) -> HandleInvalid:
        """Return the handling of rows that cannot be predicted on."""
        value: HandleInvalid = self.getOrDefault(self.handleInvalid)
        return value

    def setHandleInvalid(self: P, value: HandleInvalid) -> P:
        """Set the handling of rows that cannot be predicted on."""
        return _set(self, handleInvalid=value)

    def getPredictBatchSize(self) -> int:
        """Return the rows per call of the model."""
        value: int = self.getOrDefault(self.predictBatchSize)
        return value

    def setPredictBatchSize(self: P, value: int) -> P:
        """Choose the rows per call of the model."""
        return _set(self, predictBatchSize=value)


def _set(stage: P, **values: Any) -> P:
    """Set Params; None removes a value."""
    for name, value in values.items():
        if value is None:
            stage.clear(stage.getParam(name))
        else:
            stage._set(**{name: value})
    return stage
