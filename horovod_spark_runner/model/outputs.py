"""Columns of a model's outputs beside a DataFrame's own: arrays, vectors, classes.

Whether an output is probabilities or scores is never guessed: the user says it, what is known of
the model's last activation must agree, and probabilities are checked in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cluster.spark.session import is_case_sensitive
from ..config.prediction import DEFAULT, ClassCol, PredictionSettings, added_columns
from ..data.prepare.columns import sources_of_features
from ..data.prepare.schema import quoted
from ..errors import DataError, InvalidInputError
from ..formatting import quote_all
from ..training.onnx import CLASS, PLAIN, PROBABILITY, SCORES, TOLERANCE, VECTOR
from ..training.spec import OutputSpec
from .features import feature_argument
from .inference import SKIP, Predictor, field_names, is_scalar, prediction_udf, spark_type

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

# Whether UDFs take columns of columnar sources as they are; Spark has it from 4.3 on.
_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


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
    names = [_struct_name(settings)] if in_struct else [one.name for one in added]
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
    elif single and added == [_Added(names[0], 0, outputs[0])]:
        return predicted.withColumnRenamed(helper, names[0])
    else:
        named = [_expression(one, values[one.output]).alias(one.name) for one in added]
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


@dataclass(frozen=True)
class _Added:
    """A column made from one output.

    Attributes:
        name: its name.
        output: place of the output among the model's.
        spec: the output.
        holds: what is made of it.
        scores: whether the output is scores of classes, and not their probabilities.
    """

    name: str
    output: int
    spec: OutputSpec
    holds: str = PLAIN
    scores: bool = False


def added_by(outputs: Sequence[OutputSpec], settings: PredictionSettings) -> list[_Added]:
    """Return the columns to add: the outputs' in their order, then those of classes.

    Args:
        outputs: the model's outputs.
        settings: what is asked for.

    Raises:
        InvalidInputError: it does not fit the outputs.
    """
    names = [output.name for output in outputs]
    probabilities = _by_output("probability_col", settings.probability_col, names)
    scores = _by_output("raw_prediction_col", settings.raw_prediction_col, names)
    added, of_classes = [], []
    for place, (spec, name) in enumerate(
        zip(outputs, added_columns(names, settings.prediction_col), strict=True)
    ):
        in_scores = spec.name in scores
        if in_scores or spec.name in probabilities:
            _check_classes(spec, scores=in_scores)
            added.append(_Added(name, place, spec, CLASS, in_scores))
            if in_scores:
                of_classes.append(_Added(scores[spec.name], place, spec, SCORES, True))
            if spec.name in probabilities:
                wanted = probabilities[spec.name]
                of_classes.append(_Added(wanted, place, spec, PROBABILITY, in_scores))
        elif settings.output_form == "vector" and not is_scalar(spec):
            if spec.dtype == "string":
                raise InvalidInputError(
                    f"output_form='vector' cannot hold output {spec.name!r}, which is of strings; "
                    "leave it out"
                )
            added.append(_Added(name, place, spec, VECTOR))
        else:
            added.append(_Added(name, place, spec))
    return added + of_classes


def check_classes(
    outputs: Sequence[OutputSpec], settings: PredictionSettings, *, whole: bool = False
) -> None:
    """Check that outputs can be of the requested classes, whatever else is set.

    Args:
        outputs: the model's outputs.
        settings: what is asked for.
        whole: whether nothing else will be; ``probability_col`` may lack its
            ``raw_prediction_col`` yet by default.

    Raises:
        InvalidInputError: an output cannot be of the requested classes.
    """
    names = [output.name for output in outputs]
    probabilities = _by_output("probability_col", settings.probability_col, names)
    scores = _by_output("raw_prediction_col", settings.raw_prediction_col, names)
    for spec in outputs:
        if spec.name in scores:
            _check_classes(spec, scores=True)
        elif spec.name in probabilities and (whole or spec.activation != "linear"):
            _check_classes(spec, scores=False)


def _struct_name(settings: PredictionSettings) -> str:
    """Return the name of the one column of all outputs, for ``output_form="struct"``.

    Raises:
        InvalidInputError: the settings ask for several columns.
    """
    conflicting = [
        name
        for name in ("probability_col", "raw_prediction_col")
        if getattr(settings, name) is not None
    ]
    if conflicting:
        raise InvalidInputError(
            f"output_form='struct' puts all outputs as they are into one column; leave it or "
            f"{' and '.join(conflicting)} out"
        )
    name = settings.prediction_col
    if name is None:
        return DEFAULT
    if not isinstance(name, str):
        raise InvalidInputError(
            f"output_form='struct' makes one column, but prediction_col names several: {name!r}"
        )
    return name


def _expression(added: _Added, value: SparkColumn) -> SparkColumn:
    """Return the Spark expression of an added column.

    Args:
        added: the column.
        value: what the model gives for its output; null for a row without prediction.
    """
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    if added.holds == PLAIN:
        return value
    if added.holds == VECTOR:
        return F.when(value.isNotNull(), array_to_vector(value.cast("array<double>")))
    if is_scalar(added.spec):
        classes = _expand_binary(added, value.cast("double"))
    else:
        classes = _expand_classes(added, value.cast("array<double>"))
    if added.holds == CLASS:
        first = F.array_position(classes, F.array_max(classes))
        return F.when(value.isNotNull(), (first - 1).cast("double"))
    return F.when(value.isNotNull(), array_to_vector(classes))


def _expand_binary(added: _Added, value: SparkColumn) -> SparkColumn:
    """Return the values of both classes from an output that describes class 1."""
    from pyspark.sql import functions as F

    if not added.scores:
        right = value.between(0.0, 1.0) & ~F.isnan(value)
        share = _checked(added, value, right)
        return F.array(1.0 - share, share)
    score = _checked(added, value, ~F.isnan(value))
    if added.holds == PROBABILITY:
        share = 1.0 / (1.0 + F.exp(-score))
        return F.array(1.0 - share, share)
    return F.array(-score, score)


def _expand_classes(added: _Added, value: SparkColumn) -> SparkColumn:
    """Return the output's value of each class."""
    from pyspark.sql import functions as F

    if not added.scores:
        return _checked(added, value, are_probabilities(value, added.spec))
    scores = _checked(added, value, ~F.exists(value, F.isnan))
    if added.holds != PROBABILITY:
        return scores
    powers = _each(scores, F.array_max, lambda one, largest: F.exp(one - largest))
    return _each(powers, _total, lambda one, total: one / total)


def are_probabilities(value: SparkColumn, spec: OutputSpec) -> SparkColumn:
    """Return the condition that the doubles in ``value`` are an output's probabilities."""
    from pyspark.sql import functions as F

    tolerance = TOLERANCE[spec.dtype]
    return (F.array_min(value) >= -tolerance) & F.abs(_total(value) - 1.0).between(0.0, tolerance)


def _total(array: SparkColumn) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.aggregate(array, F.lit(0.0), lambda so_far, one: so_far + one)


def _each(
    array: SparkColumn,
    summary: Callable[[SparkColumn], SparkColumn],
    function: Callable[[SparkColumn, SparkColumn], SparkColumn],
) -> SparkColumn:
    """Return ``function`` of each element and the array's ``summary``, which is computed once."""
    from pyspark.sql import functions as F

    # Inside a lambda Spark computes an outer expression again for each element; not a field.
    computed = F.array(F.struct(array.alias("array"), summary(array).alias("summary")))
    return F.transform(
        computed, lambda row: F.transform(row["array"], lambda one: function(one, row["summary"]))
    )[0]


def _checked(added: _Added, value: SparkColumn, right: SparkColumn) -> SparkColumn:
    """Return ``value`` where it is right or null; in other rows Spark raises an error."""
    from pyspark.sql import functions as F

    if added.scores:
        problem = f"output {added.spec.name!r} of the model has scores that are not numbers: "
    else:
        problem = (
            f"output {added.spec.name!r} of the model is not probabilities, though probability_col "
            "says so (give raw_prediction_col as well if it is scores before softmax or sigmoid): "
        )
    message = F.concat(F.lit(problem), F.substring(value.cast("string"), 1, 200))
    return F.when(right | value.isNull(), value).otherwise(F.raise_error(message))


def _by_output(setting: str, columns: ClassCol, outputs: Sequence[str]) -> Mapping[str, str]:
    """Return the column for each output that has one."""
    if columns is None:
        return {}
    if isinstance(columns, str):
        if len(outputs) > 1:
            raise InvalidInputError(
                f"{setting}={columns!r} does not say which output it is of; the model has "
                f"{quote_all(outputs)}: give a dictionary, {setting}={{{outputs[0]!r}: "
                f"{columns!r}}}"
            )
        return {outputs[0]: columns}
    unknown = [name for name in columns if name not in outputs]
    if unknown:
        raise InvalidInputError(
            f"{setting} names the output {quote_all(unknown)}; the model's outputs are "
            + quote_all(outputs)
        )
    return columns


def misfit_of_classes(spec: OutputSpec, holds: str) -> tuple[str, str] | None:
    """Return the reason why an output cannot hold classes, as far as the model shows it.

    Args:
        spec: the output.
        holds: what it is taken for: ``CLASS`` (the place of the largest number is the class),
            ``PROBABILITY`` or ``SCORES``.

    Returns:
        What does not fit (``"form"``, ``"activation"`` or ``"several"``: several classes may be
        right) and a clause that says so; ``None`` if nothing is known against it.
    """
    several = len(spec.shape) == 1 and spec.shape[0] is not None and spec.shape[0] > 1
    name, activation = f"output {spec.name!r}", f"its last activation is {spec.activation!r}"
    if holds != CLASS and (spec.dtype not in TOLERANCE or not (several or is_scalar(spec))):
        return "form", f"{name} is of classes, but it is {spec.dtype} of shape {spec.shape}"
    if holds == SCORES and spec.activation in ("softmax", "sigmoid"):
        return "activation", f"{name} is scores of classes, but {activation}"
    if holds == PROBABILITY and spec.activation == "linear":
        return "activation", f"{name} is probabilities, but {activation}"
    if holds != SCORES and several and spec.activation == "sigmoid":
        return "several", (
            f"{name} is probabilities of classes of which one is right, but {activation}: "
            f"{spec.shape[0]} answers of yes or no, which do not add up to 1"
        )
    return None


def _check_classes(spec: OutputSpec, *, scores: bool) -> None:
    """Check that an output can be of classes, as far as the model shows it."""
    setting = "raw_prediction_col" if scores else "probability_col"
    misfit = misfit_of_classes(spec, SCORES if scores else PROBABILITY)
    if misfit is None:
        return
    what, text = misfit
    if what == "form":
        advice = "; it must be a real number per class, or one for two classes"
    elif what == "several":
        advice = "; take them as they are, without probability_col"
    elif scores:
        advice = ": it is probabilities; give probability_col alone"
    else:
        advice = ": if it is scores of classes (logits), give raw_prediction_col, too"
    raise InvalidInputError(f"{setting} says that {text}{advice}")
