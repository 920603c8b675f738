"""Comparison of a pipeline's ONNX file with the pipeline in Spark, on rows of a DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.prepare.schema import quoted
from ..errors import DataError, ModelError, on_one_line
from ..training.onnx import CLASS, OnnxSession
from .columns import Input, onnx_inputs
from .onnx_model import STATE
from .onnx_network import Network
from .stages import Stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS = 50
# Rows that the file refuses take a job of Spark's each: up to so many are compared.
_REFUSED_ROWS = 5
_NUMBER = "row number"
# Sums of vectors' elements may be made in another order; networks compute in float32, or less.
_TOLERANCE, _FLOAT32, _FLOAT16 = 1e-9, 1e-4, 2e-2
# Results of rows without values; others have the values of the wanted columns.
_LEFT_OUT, _ERROR = "no row", "an error"
_Result = Sequence[Any] | str


def compare_with_spark(
    contents: bytes, model: Any, frame: DataFrame, inputs: Sequence[Input], stages: Sequence[Stage]
) -> None:
    """Check that an ONNX file gives what the pipeline gives in Spark.

    Args:
        contents: the file.
        model: the fitted pipeline.
        frame: a DataFrame with rows to compare by.
        inputs: the columns that the pipeline takes.
        stages: its stages.

    Raises:
        ModelError: the results differ; the message has the row and both.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.types import LongType, StructField, StructType

    session = OnnxSession(contents)
    wanted: list[str] = session.facts["outputs"]
    taken = [Input(**one) for one in session.facts["inputs"]]
    names = [one.name for one in inputs if one.needed or one in taken]
    labels = [one.name for one in inputs if one.name not in names]
    try:
        model.transform(frame.select(*map(quoted, names)))
        labels = []
    except PySparkException:  # handleInvalid="skip" needs labels, too
        names += labels
    rows = frame.select(*map(quoted, names)).limit(_ROWS).collect()
    if not rows:
        return
    found = _run_file(session, taken, [dict(zip(names, row, strict=True)) for row in rows])
    numbered = StructType([StructField(_NUMBER, LongType()), *(frame.schema[one] for one in names)])

    def transform(numbers: Sequence[int]) -> dict[int, _Result]:
        local = [(number, *rows[number]) for number in numbers]
        before = frame.sparkSession.createDataFrame(local, numbered).coalesce(1)
        after = model.transform(before).select(quoted(_NUMBER), *map(quoted, wanted))
        values = {row[0]: tuple(row)[1:] for row in after.collect()}
        return {number: values.get(number, _LEFT_OUT) for number in numbers}

    expected = _run_spark(transform, rows, found)
    tolerance, classes = _limits(stages)
    unequal: dict[str, list[int]] = {name: [] for name in wanted}
    for number, theirs in expected.items():
        ours = found[number]
        if isinstance(ours, str) or isinstance(theirs, str):
            if ours is not theirs and not (labels and theirs is _LEFT_OUT):
                raise _difference(rows[number], "the row", ours, theirs)
            continue
        for name, one, other in zip(wanted, ours, theirs, strict=True):
            if not is_same(one, other, tolerance):
                unequal[name].append(number)
    for name, numbers in unequal.items():
        # A class whose neighbour is about as likely may be the other one elsewhere.
        if len(numbers) > (len(expected) // 2 if name in classes else 0):
            place, number = wanted.index(name), numbers[0]
            ours, theirs = found[number][place], expected[number][place]
            raise _difference(rows[number], f"column {name!r}", ours, theirs)


def _limits(stages: Iterable[Stage]) -> tuple[float, set[str]]:
    """Return how far numbers may be apart, and the columns that hold a network's classes."""
    tolerance, classes = _TOLERANCE, set()
    for stage in stages:
        if isinstance(stage, Network):
            for name, made in zip(stage.outputs, stage.added, strict=True):
                tolerance = max(tolerance, _FLOAT16 if "float16" in made.computed else _FLOAT32)
                if made.holds == CLASS:
                    classes.add(name)
    return tolerance, classes


def _run_file(
    session: OnnxSession, taken: Sequence[Input], rows: Sequence[dict[str, Any]]
) -> list[_Result]:
    """Return what the file gives for each row."""
    try:
        values = {one.name: [row[one.name] for row in rows] for one in taken}
        made = session(onnx_inputs(taken, values))
    except DataError:  # which ends the whole call
        if len(rows) == 1:
            return [_ERROR]
        return [_run_file(session, taken, [row])[0] for row in rows]
    states = made.pop(STATE).tolist()
    results = zip(*made.values(), strict=True)
    return [
        one if not state else _LEFT_OUT if state < 0 else _ERROR
        for state, one in zip(states, results, strict=True)
    ]


def _run_spark(
    transform: Callable[[Sequence[int]], dict[int, _Result]],
    rows: Sequence[Any],
    found: Sequence[_Result],
) -> dict[int, _Result]:
    """Return what Spark gives for rows, by their numbers.

    Args:
        transform: returns it; fails if a row is an error.
        rows: the rows.
        found: what the file gives.

    Raises:
        ModelError: a row is an error in Spark alone.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    def run(numbers: Sequence[int]) -> dict[int, _Result]:
        try:
            return transform(numbers) if numbers else {}
        except (PySparkException, Py4JJavaError) as error:  # some row: which one?
            if len(numbers) == 1:
                (number,) = numbers
                if found[number] is not _ERROR:
                    told = f"{_ERROR}: {on_one_line(error, 300)}"
                    raise _difference(rows[number], "the row", found[number], told) from error
                return {number: _ERROR}
        half = len(numbers) // 2
        return {**run(numbers[:half]), **run(numbers[half:])}

    refused = [number for number, one in enumerate(found) if one is _ERROR]
    results = run([number for number, one in enumerate(found) if one is not _ERROR])
    for number in refused[:_REFUSED_ROWS]:
        results.update(run([number]))
    return results


def is_same(ours: object, expected: object, tolerance: float) -> bool:
    """Return whether file and Spark give equal values; null is NaN, "" or the least integer."""
    if expected is None:
        whole = np.asarray(ours)
        if whole.dtype.kind == "f":
            return bool(np.isnan(whole).all())
        return whole.dtype.kind != "i" or bool((whole == np.iinfo(whole.dtype).min).all())
    if isinstance(expected, str):
        return bool(ours == expected)
    if hasattr(expected, "toArray"):
        expected = expected.toArray()
    one, other = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    return one.shape == other.shape and bool(
        np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    )


def _difference(row: Any, subject: str, ours: object, expected: object) -> ModelError:
    return ModelError(
        f"the ONNX file differs from the pipeline in Spark: for {row!r:.500}, {subject} is "
        f"{ours!r:.300} in the file and {expected!r:.300} in Spark"
    )
