"""Conversion of a model's outputs to added columns: arrays, vectors, classes. In Spark's JVM.

Whether an output is probabilities or scores is never guessed: the user says it, what is known of
the model's last activation must agree, and probabilities are checked in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.prediction import DEFAULT, ClassCol, PredictionSettings, added_columns
from ..errors import InvalidInputError
from ..formatting import quote_all
from ..training.onnx import CLASS, PLAIN, PROBABILITY, SCORES, TOLERANCE, VECTOR
from ..training.spec import OutputSpec
from .inference import is_scalar

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


@dataclass(frozen=True)
class Added:
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


def added_by(outputs: Sequence[OutputSpec], settings: PredictionSettings) -> list[Added]:
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
            added.append(Added(name, place, spec, CLASS, in_scores))
            if in_scores:
                of_classes.append(Added(scores[spec.name], place, spec, SCORES, True))
            if spec.name in probabilities:
                wanted = probabilities[spec.name]
                of_classes.append(Added(wanted, place, spec, PROBABILITY, in_scores))
        elif settings.output_form == "vector" and not is_scalar(spec):
            if spec.dtype == "string":
                raise InvalidInputError(
                    f"output_form='vector' cannot hold output {spec.name!r}, which is of strings; "
                    "leave it out"
                )
            added.append(Added(name, place, spec, VECTOR))
        else:
            added.append(Added(name, place, spec))
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
        InvalidInputError: they cannot.
    """
    names = [output.name for output in outputs]
    probabilities = _by_output("probability_col", settings.probability_col, names)
    scores = _by_output("raw_prediction_col", settings.raw_prediction_col, names)
    for spec in outputs:
        if spec.name in scores:
            _check_classes(spec, scores=True)
        elif spec.name in probabilities and (whole or spec.activation != "linear"):
            _check_classes(spec, scores=False)


def struct_name(settings: PredictionSettings) -> str:
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


def expression(added: Added, value: SparkColumn) -> SparkColumn:
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
        classes = _of_two(added, value.cast("double"))
    else:
        classes = _of_several(added, value.cast("array<double>"))
    if added.holds == CLASS:
        first = F.array_position(classes, F.array_max(classes))
        return F.when(value.isNotNull(), (first - 1).cast("double"))
    return F.when(value.isNotNull(), array_to_vector(classes))


def _of_two(added: Added, value: SparkColumn) -> SparkColumn:
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


def _of_several(added: Added, value: SparkColumn) -> SparkColumn:
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


def _checked(added: Added, value: SparkColumn, right: SparkColumn) -> SparkColumn:
    """Return ``value`` where it is right or null; in other rows Spark raises an error."""
    from pyspark.sql import functions as F

    if added.scores:
        problem = f"output {added.spec.name!r} of the model has scores that are no numbers: "
    else:
        problem = (
            f"output {added.spec.name!r} of the model is no probabilities, which probability_col "
            "says it is (give raw_prediction_col as well if it is scores before softmax or "
            "sigmoid): "
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
