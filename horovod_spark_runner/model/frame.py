"""A DataFrame with a model's predictions beside its own columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..cluster.spark.session import is_case_sensitive
from ..config.prediction import DEFAULT, ClassCol, PredictionSettings
from ..data.prepare.columns import sources_of_features
from ..data.prepare.schema import quoted
from ..errors import DataError
from ..formatting import quote_all
from .features import feature_argument
from .inference import SKIP, Predictor, field_names, spark_type
from .outputs import Added, added_by, expression, struct_name
from .udf import prediction_udf

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def surely_added(settings: PredictionSettings, outputs: int | None) -> list[str]:
    """Return the names of added columns, as far as the settings determine them.

    Args:
        settings: what is asked for.
        outputs: how many outputs are compared with labels; ``None`` if that is not known. Of one,
            that it is the model's only output is taken for granted.
    """
    names: list[str] = []
    for class_col in (settings.probability_col, settings.raw_prediction_col):
        if class_col is not None:
            names += [class_col] if isinstance(class_col, str) else class_col.values()
    prediction_col = settings.prediction_col
    if isinstance(prediction_col, Mapping):
        return [*names, *prediction_col.values()]
    if prediction_col is None or isinstance(prediction_col, str):
        single = outputs == 1 or settings.output_form == "struct"
        return [*names, prediction_col or DEFAULT] if single else names
    return [*names, *prediction_col]


def check_added(
    added: Sequence[str],
    existing: Sequence[str],
    settings: PredictionSettings,
    *,
    by_case: bool,
    outputs: Sequence[str] = (),
) -> None:
    """Check that the added columns replace nothing, as Spark compares names.

    Args:
        added: names of the columns to add.
        existing: columns of the DataFrame.
        settings: what named the columns to add.
        by_case: whether Spark tells upper from lower case.
        outputs: the model's outputs, where they are known.

    Raises:
        DataError: a name is taken.
    """
    existing_names = {_plain(name, by_case): name for name in existing}
    clashing = [name for name in added if _plain(name, by_case) in existing_names]
    if clashing:
        taken = [existing_names[_plain(name, by_case)] for name in clashing]
        raise DataError(
            f"the DataFrame already has a column {quote_all(taken)}, which a prediction is to be "
            "called; drop it, or name the predictions otherwise: "
            + _advice(clashing, settings, outputs)
        )
    seen: set[str] = set()
    twice = [n for n in added if (key := _plain(n, by_case)) in seen or seen.add(key)]  # type: ignore[func-returns-value]
    if twice:
        raise DataError(
            f"several predictions would be called {quote_all(twice)}; name them otherwise: "
            + _advice(twice, settings, outputs)
        )


def _plain(name: str, by_case: bool) -> str:
    return name if by_case else name.lower()


def _advice(clashing: Sequence[str], settings: PredictionSettings, outputs: Sequence[str]) -> str:
    """Return advice how to choose other names, by the setting of the conflicting ones."""
    for setting in ("probability_col", "raw_prediction_col"):
        class_col: ClassCol = getattr(settings, setting)
        if isinstance(class_col, str) and class_col in clashing:
            return f'{setting}="…"'
        for output, name in class_col.items() if isinstance(class_col, Mapping) else ():
            if name in clashing:
                return f'{setting}={{{output!r}: "…"}}'
    if len(outputs) < 2:
        return 'prediction_col="…"'
    example = {name: f"predicted_{name}" for name in outputs}
    return f"prediction_col={example!r}, or prediction_col='predicted' for these very names"


# Whether UDFs take columns of columnar sources as they are; Spark has it from 4.3 on.
_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


def with_predictions(
    frame: DataFrame, predictor: Predictor, settings: PredictionSettings
) -> DataFrame:
    """Return ``frame`` with columns of the model's outputs.

    Args:
        frame: has the model's feature columns.
        predictor: predicts on them.
        settings: what to add.

    Raises:
        DataError: a column is missing, of another type, there twice, or has an added one's name.
        InvalidInputError: the settings do not fit the outputs.
        ModelError: Spark has no type for an output.
    """
    from pyspark.sql import functions as F

    outputs = predictor.outputs
    by_case = is_case_sensitive(frame.sparkSession)
    sources = sources_of_features(frame, predictor.names)
    in_struct = settings.output_form == "struct"
    added = [] if in_struct else added_by(outputs, settings)
    names = [struct_name(settings)] if in_struct else [one.name for one in added]
    named = [output.name for output in outputs]
    check_added(names, frame.columns, settings, by_case=by_case, outputs=named)
    pairs = zip(sources, predictor.columns, strict=True)
    arguments = [feature_argument(source, column) for source, column in pairs]
    types = [spark_type(output) for output in outputs]
    # Else Spark computes it twice: for the filter, which it moves down, and for the column.
    once = predictor.handle_invalid == SKIP
    udf = prediction_udf(predictor, _return_type(types), deterministic=not once)
    helper = _free_name(frame.columns)
    predicted = _in_rows(frame, predictor.names[0]).select("*", udf(*arguments).alias(helper))
    # One call of the model for all outputs: the struct is made once, then taken apart.
    single = len(outputs) == 1
    values = [F.col(helper)] if single else [F.col(helper)[f] for f in field_names(len(outputs))]
    if once:
        predicted = predicted.filter(values[0].isNotNull())
    if in_struct:
        fields = [v.alias(output.name) for v, output in zip(values, outputs, strict=True)]
        named = [F.when(values[0].isNotNull(), F.struct(*fields)).alias(names[0])]
    elif single and added == [Added(names[0], 0, outputs[0])]:
        return predicted.withColumnRenamed(helper, names[0])
    else:
        named = [expression(one, values[one.output]).alias(one.name) for one in added]
    return predicted.select("*", *named).drop(helper)


def _in_rows(frame: DataFrame, column: str) -> DataFrame:
    """Return ``frame``, such that Spark hands its rows to the UDF one by one.

    From a columnar source, such as Parquet, Spark 4.3 hands the UDF columns. It copies arrays out
    of them more slowly than out of rows, and fails on vectors and other user-defined types among
    the columns that stay behind. A filter makes rows of them; this one is true for all, which the
    optimizer does not see, and lets other filters pass.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    try:
        columnar = str(frame.sparkSession.conf.get(_COLUMNAR))
    except PySparkException:  # an earlier Spark, which does not know it
        return frame
    if columnar.lower() == "false":
        return frame
    return frame.filter(F.hash(F.isnull(F.col(quoted(column)))) >= F.lit(-(2**31)))


def _free_name(existing: Sequence[str]) -> str:
    taken = {name.lower() for name in existing}
    name = "__horovod_outputs"
    while name in taken:
        name += "_"
    return name


def _return_type(types: Sequence[str]) -> str:
    if len(types) == 1:
        return types[0]
    pairs = zip(field_names(len(types)), types, strict=True)
    return "struct<" + ",".join(f"{name}:{kind}" for name, kind in pairs) + ">"
