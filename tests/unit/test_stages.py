"""The stages of an exported pipeline, as the scorer and as one ONNX file; no Spark.

What Spark gives was asked of Spark 4.3; `tests/spark/test_export_stages.py` asks it each time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataError, ModelError
from horovod_spark_runner.export.onnx_model import STATE, WITHOUT, WRITERS, onnx_inputs, onnx_of
from horovod_spark_runner.scoring.bundle import KINDS, Bundle
from horovod_spark_runner.scoring.columns import Input, Stage
from horovod_spark_runner.scoring.scorer import Scorer
from horovod_spark_runner.scoring.values import Bucketizer, Imputer, StringIndexer
from horovod_spark_runner.scoring.vectors import PolynomialExpansion, VectorSlicer
from horovod_spark_runner.training.onnx import OnnxSession


def test_each_stage_has_a_form_in_onnx_or_a_reason_why_not() -> None:
    assert not WRITERS.keys() & WITHOUT.keys()
    assert WRITERS.keys() | WITHOUT.keys() == KINDS.keys()


def both(stage: Stage, taken: Input, values: list[Any]) -> list[Any]:
    """Return what a stage adds for each row, or "error": by the scorer and as an ONNX file."""
    bundle = Bundle((taken,), (stage,))
    scorer, (output,) = Scorer(bundle), stage.adds
    made: list[Any] = []
    for value in values:
        try:
            made.append(np.asarray(scorer.score({taken.name: [value]})[output])[0])
        except DataError:
            made.append("error")
    found = OnnxSession(onnx_of(bundle))(onnx_inputs([taken], {taken.name: values}))
    for one, other, state in zip(made, found[output], found[STATE], strict=True):
        if isinstance(one, str):
            assert state > 0
        else:
            assert state == 0
            assert one.tobytes() == np.asarray(other).tobytes(), (one, other)
    return [one if isinstance(one, str) else one.tolist() for one in made]


@pytest.mark.parametrize("handle", ["error", "keep"])
def test_minus_zero_is_below_a_first_bound_of_zero(handle: str) -> None:
    stage = Bucketizer(("x",), ("b",), ((0.0, 1.0, 2.0),), handle)
    assert both(stage, Input("x", "double"), [0.0, -0.0, 1.0, 2.0]) == [0.0, "error", 1.0, 1.0]
    stage = Bucketizer(("x",), ("b",), ((-1.0, -0.5, 0.0),), handle)
    assert both(stage, Input("x", "double"), [0.0, -0.0]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "labels", "values", "places"),
    [
        ("double", ["1", "1.00", "1e0", "1d", "1_0.0", "nan", "inf"], [1.0, np.nan, np.inf], "777"),
        ("double", ["NaN", "-0.0", "1.0", "-Infinity"], [np.nan, -0.0, 0.0, 1.0, -np.inf], "01423"),
        ("double", ["1.0E7", "9999999.0", "0.001", "9.9E-4"], [1e7, 9999999, 1e-3, 9.9e-4], "0123"),
        ("double", ["10000000.0", "1.0E-3", "1.0e7", "10.0E6"], [1e7, 1e-3], "44"),
        ("float", ["0.1", "3.4028235E38", "16777.217"], [0.1, 3.4028235e38, 16777.217], "012"),
        ("float", ["0.10000000149011612", "1.0E300", "1.0E-300"], [0.1, np.inf, 0.0], "333"),
    ],
)
def test_labels_of_real_numbers_are_what_java_makes_of_them(
    kind: str, labels: list[str], values: list[float], places: str
) -> None:
    stage = StringIndexer(("x",), ("t",), (tuple(labels),), "keep")
    assert both(stage, Input("x", kind), values) == [float(place) for place in places]


def test_a_product_of_zero_has_no_sign() -> None:
    stage, given = PolynomialExpansion("v", "o", 2), [[-0.0, 3.0], [-1e-200, 1e-200]]
    made = both(stage, Input("v", "vector", 2), given)
    assert made == [[0.0, 0.0, 3.0, 0.0, 9.0], [-1e-200, 0.0, 1e-200, 0.0, 0.0]]
    assert not np.signbit([row[1] for row in made]).any()
    assert not np.signbit([row[3] for row in made]).any()


def test_whole_numbers_are_imputed_up_to_the_largest() -> None:
    stage = Imputer(("x",), ("o",), (1.5,), float("nan"))
    given: list[Any] = [2**63 - 1, -(2**63), 2**53 + 1, None]
    assert both(stage, Input("x", "bigint"), given) == [2**63 - 1, -(2**63), 2**53, 1]
    stage = Imputer(("x",), ("o",), (300.0,), 7.0)
    assert both(stage, Input("x", "tinyint"), [127, -128, 7]) == [127, -128, "error"]


def test_an_element_that_vectors_do_not_have_is_named() -> None:
    bundle = Bundle((Input("v", "vector", 2),), (VectorSlicer("v", "s", np.array([0, 5])),))
    told = r"'v'.*\b2 elements.*element 5\b"
    with pytest.raises(DataError, match=told):
        Scorer(bundle).score_row({"v": [1.0, 2.0]})
    with pytest.raises(ModelError, match=told):
        onnx_of(bundle)
