"""The ONNX file of a pipeline, compared with the scorer on real rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError, ModelError
from ...scoring.bundle import Bundle
from ...scoring.columns import DTYPES, Column, Input, Numbers, Vectors, Words
from ...scoring.network import Network
from ...scoring.scorer import Scorer
from ...training.onnx import OnnxSession
from .model import NULL, STATE, onnx_of, wanted_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS = 50
# Sums of vectors' elements may be made in another order; networks are of float32.
_TOLERANCE, _NETWORK = 1e-9, 1e-4


def pipeline_file(bundle: Bundle, frame: DataFrame, columns: Sequence[str] | None) -> bytes:
    """Return a pipeline as an ONNX file with the scorer's results.

    Args:
        bundle: the pipeline; its networks must be ONNX.
        frame: a DataFrame with rows to compare by.
        columns: the columns it is to give; by default those that the last stage adds.

    Raises:
        ModelError: a stage has no form in ONNX, or a row's values differ; the message names it.
        InvalidInputError: ``columns`` names what the pipeline does not add.
    """
    contents = onnx_of(bundle, columns)
    session = OnnxSession(contents)
    wanted = wanted_columns(bundle, columns)
    taken = {one["name"] for one in session.facts["inputs"]}
    names = [one.name for one in bundle.inputs if one.needed or one.name in taken]
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]
    sampled = frame.select(*quoted).limit(_ROWS).collect()
    if not sampled:
        return contents
    rows = [dict(zip(names, row, strict=True)) for row in sampled]
    _compare(bundle, session, rows, wanted)
    return contents


def _compare(
    bundle: Bundle, session: OnnxSession, rows: list[dict[str, Any]], wanted: Sequence[str]
) -> None:
    scorer = Scorer(bundle)
    try:
        made = _made(bundle, session, rows)
    except DataError:  # which ends the whole call
        rows = [row for row in rows if not _neither_takes(bundle, session, scorer, row)]
        if not rows:
            return
        made = _made(bundle, session, rows)
    networks = any(isinstance(stage, Network) for stage in bundle.stages)
    tolerance = _NETWORK if networks else _TOLERANCE
    for number, row in enumerate(rows):
        state = int(made[STATE][number])
        try:
            expected = scorer.score_row(row, wanted)
        except DataError as error:
            if state <= 0:
                raise _differs(row, f"row_state is {state}", f"the error {error}") from error
            continue
        if expected is None or state:
            if (expected is None) != (state == -1):
                raise _differs(row, f"row_state is {state}", expected)
            continue
        for name in wanted:
            if not same(made[name][number], expected[name], tolerance):
                raise _differs(row, f"{name!r} is {made[name][number]!r:.300}", expected[name])


def _made(
    bundle: Bundle, session: OnnxSession, rows: list[dict[str, Any]]
) -> dict[str, np.ndarray]:
    """Run the file on rows."""
    taken = {one["name"] for one in session.facts["inputs"]}
    inputs = {one.name: one for one in bundle.inputs if one.name in taken}
    return session(onnx_inputs(inputs.values(), {n: [row[n] for row in rows] for n in inputs}))


def _neither_takes(
    bundle: Bundle, session: OnnxSession, scorer: Scorer, row: dict[str, Any]
) -> bool:
    """Return whether file and scorer both refuse a row; raise the error of only one."""
    try:
        _made(bundle, session, [row])
        return False
    except DataError as error:
        try:
            expected = scorer.score_row(row)
        except DataError:
            return True
        raise _differs(row, f"call is the error {error}", expected) from error


def same(ours: Any, expected: Any, tolerance: float) -> bool:
    """Return whether file and scorer give equal values; null is NaN, or the least integer."""
    if expected is None:
        whole = np.asarray(ours)
        if whole.dtype.kind == "f":
            return bool(np.isnan(whole).all())
        return whole.dtype.kind != "i" or bool((whole == np.iinfo(whole.dtype).min).all())
    if isinstance(expected, str):
        return bool(ours == expected)
    one, other = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    return one.shape == other.shape and bool(
        np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    )


def _differs(row: Mapping[str, Any], difference: str, expected: Any) -> ModelError:
    return ModelError(
        f"the ONNX file does not give what the pipeline gives: for the row {row!r:.500} its "
        f"{difference}, and the pipeline's is {expected!r:.300}"
    )


def onnx_inputs(inputs: Any, values: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Return the inputs of a pipeline's ONNX file from columns of Python values.

    Args:
        inputs: the columns it takes.
        values: their values; ``None`` for null.

    Raises:
        DataError: a value is of another type than the column.
    """
    fed: dict[str, np.ndarray] = {}
    for one in inputs:
        column = one.convert(list(values[one.name]))
        fed[one.name], valid = _array(one, column), column.valid
        if valid is not None:
            fed[one.name + NULL] = ~valid
    return fed


def _array(one: Input, column: Column) -> np.ndarray:
    if isinstance(column, Words):
        return np.array(["" if text is None else text for text in column.data], object)
    if isinstance(column, Vectors):
        return column.dense()
    assert isinstance(column, Numbers)
    return column.data.astype(DTYPES[one.kind])
