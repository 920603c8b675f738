"""The stages of an exported pipeline in its ONNX file; no Spark.

What Spark gives was asked of Spark 4.3; `tests/spark/test_export_stages.py` asks it each time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataError, ModelError
from horovod_spark_runner.export.columns import Input, onnx_inputs
from horovod_spark_runner.export.onnx_model import STATE, build_onnx
from horovod_spark_runner.export.stages import (
    Bucketizer,
    Imputer,
    OneHotEncoder,
    PolynomialExpansion,
    Stage,
    StringIndexer,
    VectorSlicer,
)
from horovod_spark_runner.training.onnx import OnnxSession


def run(stage: Stage, taken: Input, values: list[Any]) -> list[Any]:
    """Return what a stage adds for each row in an ONNX file, or "error"."""
    found = OnnxSession(build_onnx([taken], [stage]))(onnx_inputs([taken], {taken.name: values}))
    results = zip(found[stage.output].tolist(), found[STATE], strict=True)
    return ["error" if state else one for one, state in results]


@pytest.mark.parametrize("handle", ["error", "keep"])
def test_minus_zero_is_below_a_first_bound_of_zero(handle: str) -> None:
    stage = Bucketizer(("x",), ("b",), ((0.0, 1.0, 2.0),), handle)
    assert run(stage, Input("x", "double"), [0.0, -0.0, 1.0, 2.0]) == [0.0, "error", 1.0, 1.0]
    stage = Bucketizer(("x",), ("b",), ((-1.0, -0.5, 0.0),), handle)
    assert run(stage, Input("x", "double"), [0.0, -0.0]) == [1.0, 1.0]


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
    assert run(stage, Input("x", kind), values) == [float(place) for place in places]


def test_a_product_of_zero_has_no_sign() -> None:
    stage, given = PolynomialExpansion(("v",), ("o",), 2), [[-0.0, 3.0], [-1e-200, 1e-200]]
    made = run(stage, Input("v", "vector", 2), given)
    assert made == [[0.0, 0.0, 3.0, 0.0, 9.0], [-1e-200, 0.0, 1e-200, 0.0, 0.0]]
    assert not np.signbit([row[1] for row in made]).any()
    assert not np.signbit([row[3] for row in made]).any()


def test_whole_numbers_are_imputed_up_to_the_largest() -> None:
    stage = Imputer(("x",), ("o",), (1.5,), float("nan"))
    given: list[Any] = [2**63 - 1, -(2**63), 2**53 + 1, None]
    assert run(stage, Input("x", "bigint"), given) == [2**63 - 1, -(2**63), 2**53, 1]
    stage = Imputer(("x",), ("o",), (300.0,), 7.0)
    assert run(stage, Input("x", "tinyint"), [127, -128, 7]) == [127, -128, "error"]


def test_an_element_that_vectors_do_not_have_is_named() -> None:
    stage = VectorSlicer(("v",), ("s",), np.array([0, 5]))
    with pytest.raises(ModelError, match=r"'v'.*\b2 elements.*element 5\b"):
        build_onnx([Input("v", "vector", 2)], [stage])


def test_vectors_that_are_mostly_zeros_are_refused_by_name() -> None:
    stage = OneHotEncoder(("x",), ("v",), (5000,), True, "error")
    with pytest.raises(ModelError, match="'v'.*4,999.*4,096"):
        build_onnx([Input("x", "double")], [stage])


def test_values_as_a_file_takes_them() -> None:
    columns = [
        Input("n", "int"),
        Input("t", "string"),
        Input("a", "array", 2),
        Input("b", "boolean"),
    ]
    values: dict[str, list[Any]] = {
        "n": [1, None, -(2**31)],
        "t": ["ä", None, ""],
        "a": [[1, 2], [1], [None, 2]],  # of another size, and with a null in it: null in Spark
        "b": [True, False, None],
    }
    fed = onnx_inputs(columns, values)
    assert fed["n"].dtype == np.int32
    assert {name: array.tolist() for name, array in fed.items()} == {
        "n": [1, 0, -(2**31)],
        "n.null": [False, True, False],
        "t": ["ä", "", ""],
        "t.null": [False, True, False],
        "a": [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]],
        "a.null": [False, True, True],
        "b": [True, False, False],
        "b.null": [False, False, True],
    }
    with pytest.raises(DataError, match=r"'v'.*\b3\b.*\b2\b"):
        onnx_inputs([Input("v", "vector", 2)], {"v": [[1.0, 2.0], [0.0, 0.0, 0.0]]})
