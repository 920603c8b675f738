"""Settings of a trained model's predictions: its columns, and those it adds to a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import InvalidInputError, brief
from ..formatting import quote_all
from .fields import Settings, from_table, setting
from .validators import COLUMNS, TEXT, ColumnNames, Kind, choice, count, optional

# One name, a prefix, or names by output or in their order; None for the default.
PredictionCol = str | Mapping[str, str] | Sequence[str] | None
# The name for a model's only output, or names by output; None for none.
ClassCol = str | Mapping[str, str] | None
OutputForm = Literal["array", "vector", "struct"]
HandleInvalid = Literal["error", "skip", "keep"]


def check_prediction_col(name: str, value: object) -> PredictionCol:
    """Validate the names of the columns to add, before the outputs are known.

    Raises:
        InvalidInputError: it is neither a name, nor several.
    """
    if value is None or (isinstance(value, str) and value):
        return value
    several = isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes))
    names = list(value.values()) if isinstance(value, Mapping) else value
    if not several or not names or not _are_names(names):
        raise InvalidInputError(
            f"{name} must be a column's name (for several outputs, what their columns begin with), "
            "a dictionary from output to column, or a list of columns in the outputs' order, got "
            f"{brief(value)}"
        )
    return dict(value) if isinstance(value, Mapping) else list(value)  # type: ignore[call-overload]


def _check_class_col(name: str, value: object) -> ClassCol:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, Mapping) and value and _are_names([*value, *value.values()]):
        return dict(value)
    raise InvalidInputError(
        f"{name} must be a column's name or, for several outputs, a dictionary from output to "
        f"column, got {brief(value)}"
    )


def _are_names(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(name, str) and name for name in value)


@from_table
@dataclass(frozen=True, kw_only=True)
class PredictionSettings(Settings):
    """Settings of a trained model's predictions."""

    features_col: str | None = setting(
        None,
        optional(TEXT),
        "feature column, for a model that takes one: Spark ML's name for ``feature_cols`` of a "
        "single column. By default, the columns the model was trained on.",
    )
    feature_cols: ColumnNames | None = setting(
        None,
        optional(COLUMNS),
        "feature columns: a list, in the order of the model's inputs, or a dictionary from input "
        "to column; a list in place of a column joins several into one input. By default, the "
        "columns the model was trained on.",
    )
    prediction_col: PredictionCol = setting(
        None,
        Kind("column, or columns by output or in the outputs' order", check_prediction_col),
        'names of the added columns. ``None`` (default): "prediction" for a single output; the '
        "outputs' names for several. A string: the name, or, for several outputs, a prefix "
        '(``"p"`` makes ``"p_price"``). A dictionary from output to column, where other outputs '
        "keep their names; or a list, in the outputs' order.",
    )
    probability_col: ClassCol = setting(
        None,
        Kind("column, or columns by output", _check_class_col),
        "column for the probabilities of the classes, as Spark ML's vector; the output's column "
        "of ``prediction_col`` then holds the index of the likeliest class, a double, as Spark's "
        "evaluators take it. It declares that the output is a probability for each class "
        "(softmax), or that of class 1 of two (sigmoid), which is checked in every row; with "
        "``raw_prediction_col``, they are computed from that. For a model with several outputs, a "
        "dictionary from output to column. None by default.",
    )
    raw_prediction_col: ClassCol = setting(
        None,
        Kind("column, or columns by output", _check_class_col),
        "column for the scores of the classes before softmax or sigmoid (logits), as Spark ML's "
        "vector. It declares that the output is such scores; the output's column of "
        "``prediction_col`` then holds the index of the largest one, a double. See "
        "``probability_col``. None by default.",
    )
    output_form: OutputForm = setting(
        "array",
        choice(*get_args(OutputForm)),
        'form of outputs of several numbers per row: ``"array"`` (default) of numbers of the '
        "output's type, or Spark ML's ``\"vector\"``, of doubles; an output of one number per row "
        'is a number in both. ``"struct"`` puts all outputs, as arrays and numbers, into one '
        "column.",
    )
    handle_invalid: HandleInvalid = setting(
        "error",
        choice(*get_args(HandleInvalid)),
        "treatment of rows with a null, or an array that has null elements or another size, in a "
        'feature column: ``"error"`` (default), ``"skip"`` drops them, ``"keep"`` predicts null. '
        "Invalid bytes of an image or array are always an error.",
    )
    predict_batch_size: int = setting(1024, count(), "rows per call of the model (1024).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features_col is not None and self.feature_cols is not None:
            raise InvalidInputError(
                f"featuresCol={self.features_col!r} and featureCols={brief(self.feature_cols)} "
                "both name the feature columns, and neither is joined to the other: give one of "
                'them, and None for the other; featureCols=[["a", "b"]] joins columns into one '
                "input"
            )


# Name of the column of a single output.
DEFAULT = "prediction"


def added_columns(outputs: Sequence[str], prediction_col: PredictionCol) -> list[str]:
    """Return the name of each output's column.

    Args:
        outputs: names of the outputs.
        prediction_col: the requested columns.

    Raises:
        InvalidInputError: it does not fit the outputs.
    """
    if isinstance(prediction_col, Mapping):
        unknown = [name for name in prediction_col if name not in outputs]
        if unknown:
            raise InvalidInputError(
                f"prediction_col names the output {quote_all(unknown)}; the model's outputs are "
                + quote_all(outputs)
            )
        return [prediction_col.get(name, name) for name in outputs]
    if isinstance(prediction_col, str):
        return (
            [prediction_col]
            if len(outputs) == 1
            else [f"{prediction_col}_{name}" for name in outputs]
        )
    if prediction_col is None:
        return [DEFAULT] if len(outputs) == 1 else list(outputs)
    if len(prediction_col) != len(outputs):
        raise InvalidInputError(
            f"prediction_col gives {len(prediction_col)} columns, but the model's outputs are "
            + quote_all(outputs)
        )
    return list(prediction_col)
