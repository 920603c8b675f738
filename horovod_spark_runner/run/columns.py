"""Resolve the model's columns: given, by Spark ML's names, or by the model's names."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import cloudpickle

from ..cluster.driver.result import explain_spark_error
from ..cluster.protocol.outcome import describe_exception
from ..cluster.spark.session import is_case_sensitive
from ..cluster.spark.tasks import query_worker
from ..config.prediction import PredictionSettings
from ..config.training import TrainingConfig
from ..config.validators import ColumnNames
from ..data.prepare.datasets import check_data, frame_of, session_of
from ..data.prepare.schema import Roles
from ..errors import DataError, InvalidInputError, ModelError
from ..formatting import quote_all
from ..frameworks import model_of
from ..model.outputs import check_added, surely_added
from ..serialize import dumps
from ..training.engine import SAVED_MODEL, engine_named
from ..training.spec import FEATURES, LABEL, Binding, ModelNames, ModelSource, bind_columns
from ..typed_json import parse_plain, to_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Columns:
    """The columns that a model is trained on.

    Attributes:
        inputs: columns of the model's inputs.
        outputs: columns that its outputs are compared with.
        weight: column of the rows' weights.
    """

    inputs: Binding
    outputs: Binding
    weight: str | None

    @property
    def roles(self) -> Roles:
        return Roles(self.inputs.columns, self.outputs.columns, self.weight)


def resolve_columns(
    df: DataFrame | str | Path, config: TrainingConfig, model: ModelSource
) -> Columns | None:
    """Return the columns that are set, or those with Spark ML's names.

    Returns:
        ``None`` if the model decides: see `resolve_columns_by_model`.

    Raises:
        DataError: the rows cannot be trained on.
        InvalidInputError: another setting does not fit the columns.
    """
    if config.feature_cols is not None:
        return _check_columns(df, config, model, config.feature_cols, config.label_cols)
    available = frame_of(df).columns
    if FEATURES not in available:
        return None
    return _check_columns(df, config, model, *_by_convention(config.label_cols, available))


def resolve_columns_by_model(
    df: DataFrame | str | Path, config: TrainingConfig, model: ModelSource
) -> Columns:
    """Build the model once, in a Spark task, and return the columns with its inputs' names.

    Raises:
        DataError: names do not match, or the rows cannot be trained on.
        ModelError: the model cannot be built.
    """
    names = _names_of_model(model, session_of(df))
    features, labels = by_name(names, config.label_cols, frame_of(df).columns)
    return _check_columns(df, config, model, features, labels)


def check_labels(df: DataFrame | str | Path, config: TrainingConfig, model: ModelSource) -> None:
    """Check that a model to be trained without labels needs none.

    It is built once, in a Spark task, unless `label_cols` says that there are none.

    Raises:
        DataError: its loss compares outputs with labels.
        ModelError: the model cannot be built.
    """
    if config.label_cols is None and _names_of_model(model, session_of(df)).needs_labels:
        raise _missing_labels("the model's loss compares its outputs with labels")


def _check_columns(
    df: DataFrame | str | Path,
    config: TrainingConfig,
    model: ModelSource,
    features: ColumnNames,
    labels: ColumnNames | None,
) -> Columns:
    """Return the columns once they, the rows and the settings that name columns fit together."""
    inputs, outputs = bind_columns(features, "feature_cols"), bind_columns(labels, "label_cols")
    if config.fit.class_weight is not None:
        _check_class_weight(config, outputs)
    columns = Columns(inputs, outputs, config.sample_weight_col)
    check_data(df, columns.roles, config.data, config.validation)
    if config.prediction_col is not None:
        settings = PredictionSettings(prediction_col=config.prediction_col)
        added = surely_added(settings, len(outputs.slots))
        by_case = is_case_sensitive(session_of(df))
        check_added(added, frame_of(df).columns, settings, by_case=by_case)
    if config.checkpoints.saved_model:
        _check_saved_model(model, inputs, config.data.transforms)
    return columns


def _check_class_weight(config: TrainingConfig, outputs: Binding) -> None:
    if config.sample_weight_col is not None:
        raise InvalidInputError(
            "class_weight and sample_weight_col cannot both be given; multiply the weights in the "
            "column"
        )
    if len(outputs.slots) != 1:
        raise InvalidInputError(
            "class_weight is for a model with one output, but label_cols gives "
            f"{len(outputs.slots)}: {outputs.describe()}"
        )


def _check_saved_model(source: ModelSource, inputs: Binding, transforms: Container[str]) -> None:
    """Check that a SavedModel can be written, as far as the columns show.

    Args:
        source: the model.
        inputs: its feature columns.
        transforms: columns with a transform.

    Raises:
        InvalidInputError: the engine has no SavedModel.
        ModelError: a column cannot be an input of one.
    """
    transformed = [name for name in inputs.columns if name in transforms]
    engine = engine_named(source.engine)
    if SAVED_MODEL not in engine.export_formats:
        raise InvalidInputError(
            "CheckpointOptions(saved_model=True) is for Keras models, but a "
            f"{model_of(source.engine)} is to be trained. Leave it out, and export the trained "
            "model in another format: TorchTransformer.export, for a PyTorch module"
        )
    engine.check_export(SAVED_MODEL, inputs.columns, transformed)


def _by_convention(
    labels: ColumnNames | None, available: Sequence[str]
) -> tuple[ColumnNames, ColumnNames | None]:
    """Return the feature and label columns by Spark ML's names, where no features are named.

    Args:
        labels: what was given as ``label_cols``.
        available: the columns there are, `FEATURES` among them.
    """
    if labels is None and LABEL in available:
        labels = [LABEL]
    return [FEATURES], labels


def by_name(
    model: ModelNames, labels: ColumnNames | None, available: Sequence[str]
) -> tuple[ColumnNames, ColumnNames | None]:
    """Return the feature and label columns that are called as the model's inputs and outputs.

    Args:
        model: what the model calls these.
        labels: what was given as ``label_cols``.
        available: the columns there are, `FEATURES` not among them.

    Raises:
        DataError: names and columns do not tell for certain which is which.
    """
    there = f"the DataFrame's columns are {quote_all(available)}"
    unknown = f"feature_cols is not given, and the DataFrame has no column {FEATURES!r}"
    advice = "name the columns that feed the model's inputs, in their order or by their names"
    if not model.inputs:
        raise DataError(
            f"{unknown}; the model has no inputs with names of their own before it is given data: "
            f"{advice}; {there}"
        )
    fitting = [names for names in model.inputs if set(names) <= set(available)]
    if not fitting:
        missing = [name for name in model.inputs[0] if name not in available]
        raise DataError(
            f"{unknown}; of the model's inputs {_alternatives(model.inputs)}, "
            f"{quote_all(missing)} is missing: {advice}; {there}"
        )
    if len(fitting) > 1:
        raise DataError(
            f"{unknown}; the model's inputs are called {_alternatives(fitting)}, all of "
            "which are columns: say in feature_cols which column feeds which, as a dictionary"
        )
    features = dict.fromkeys(fitting[0])
    chosen = _labels_by_name(model, tuple(features), available) if labels is None else labels
    return {name: name for name in features}, chosen


def _labels_by_name(
    model: ModelNames, features: Sequence[str], available: Sequence[str]
) -> ColumnNames | None:
    """Return the label columns, none for a model that needs none."""
    fitting = [names for names in model.outputs if set(names) <= set(available)]
    candidates: list[tuple[str, ...]] = list(fitting)
    if LABEL in available and LABEL not in features and (LABEL,) not in candidates:
        candidates.append((LABEL,))
    partly = sorted({name for names in model.outputs for name in names if name in available})
    reason = ""
    if len(candidates) > 1:
        reason = f"the columns {_alternatives(candidates)} may each be meant"
    elif candidates and set(candidates[0]) & set(features):
        reason = (
            f"output and input {quote_all(sorted({*candidates[0]} & {*features}))} share a name"
        )
    elif not candidates and partly:
        reason = (
            f"of the model's outputs {_alternatives(model.outputs)}, only {quote_all(partly)} is "
            "a column"
        )
    elif not candidates and model.needs_labels:
        named = f" its outputs are {_alternatives(model.outputs)}," if model.outputs else ""
        reason = (
            f"the model is compiled with a loss,{named} and none of the DataFrame's columns "
            f"{quote_all(available)} is called so, or {LABEL!r} and not an input"
        )
    if reason:
        raise _missing_labels(reason)
    if not candidates:
        return None
    # A single output needs no name.
    return (
        list(candidates[0]) if len(candidates[0]) == 1 else {name: name for name in candidates[0]}
    )


def _missing_labels(reason: str) -> DataError:
    return DataError(
        f"label_cols is not given, and {reason}; name the columns the model's outputs are compared "
        "with, label_cols=[…] or {output: column}, those of feature_cols for an autoencoder; [] "
        "for none"
    )


def _alternatives(alternatives: Sequence[Sequence[str]]) -> str:
    return " or ".join(quote_all(names) for names in alternatives)


@dataclass(frozen=True)
class _Answer:
    """Answer of a worker: the names, or the traceback of the failure."""

    names: ModelNames | None = None
    problem: str = ""


@dataclass(frozen=True)
class _Names:
    """Builds the model in one of Spark's Python workers, and returns its names."""

    source: bytes = field(repr=False)

    def __call__(self) -> str:
        try:
            source: ModelSource = cloudpickle.loads(self.source)
            return to_json(_Answer(engine_named(source.engine).names(source)))
        except Exception as error:  # the user's function
            return to_json(_Answer(problem=describe_exception(error)[2]))


def _names_of_model(source: ModelSource, spark: SparkSession) -> ModelNames:
    """Build the model once, in one of Spark's Python workers, and return its names.

    Raises:
        ModelError: it cannot be built; with the traceback.
        EnvironmentProblem: Spark's Python lacks something.
        LaunchError: Spark could not run the job.
    """
    try:
        text = query_worker(spark, _Names(dumps(source)))
    except Exception as error:
        raise explain_spark_error(error) from error
    answer = parse_plain(text, _Answer)
    if answer.names is None:
        raise ModelError(
            "columns are not named, and the model, which may tell them, could not be built:\n"
            + answer.problem.rstrip()
        )
    return answer.names


# A column, several joined, or none; by the names of inputs or outputs, or in their order.
_Slot: TypeAlias = str | list[str] | None
Recorded: TypeAlias = list[_Slot] | dict[str, _Slot]


def recorded_columns(binding: Binding) -> Recorded:
    """Return ``feature_cols`` or ``label_cols`` as JSON."""
    slots: list[_Slot] = [s[0] if len(s) == 1 else list(s) or None for s in binding.slots]
    return slots if binding.names is None else dict(zip(binding.names, slots, strict=True))
