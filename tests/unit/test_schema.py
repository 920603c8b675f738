"""Roles, shapes and observed values, without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_spark_runner.data.materialize import check_values
from horovod_spark_runner.data.schema import Roles, Source, check_roles, check_shapes, quoted
from horovod_spark_runner.errors import DataError


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (Roles((), ("y",)), "feature_cols names no column"),
        (Roles(("a",), ()), "label_cols names no column"),
        (Roles(("a", "a"), ("y",)), "feature_cols names 'a' more than once"),
        (Roles(("a",), ("y", "y")), "label_cols names 'y' more than once"),
        (Roles(("a", "y"), ("y",)), "'y' is in label_cols and in feature_cols"),
        (Roles(("a",), ("y",), "a"), "sample_weight_col 'a' is a feature or label too"),
        (Roles(("b",), ("y",)), r"no column 'b'; it has 'a', 'y', 'd', 'd'"),
        (Roles(("a",), ("z",)), "no column 'z'"),
        (Roles(("a",), ("y",), "w"), "no column 'w'"),
        (Roles(("d",), ("y",)), "several columns named 'd'"),
    ],
)
def test_roles_are_checked(roles: Roles, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_roles(roles, ["a", "y", "d", "d"])


SOURCES = (Source("x", "array", "float", "float32"), Source("y", "scalar", "int", "int32"))
GOOD = {"rows": 9, "null0": 0, "inner0": 0, "min0": 4, "max0": 4, "null1": 0}


def test_widths() -> None:
    assert check_values(SOURCES, GOOD, Roles(("x",), ("y",))) == {"x": 4, "y": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "the DataFrame has no rows"),
        ({"null1": 3}, "column 'y' has 3 null values in 9 rows"),
        ({"inner0": 2}, "column 'x' has 2 arrays with null elements in 9 rows"),
        ({"min0": 3}, "column 'x' holds arrays of 3 to 4 elements"),
        ({"min0": 0, "max0": 0}, "column 'x' holds empty arrays only"),
    ],
)
def test_values_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_values(SOURCES, {**GOOD, **change}, Roles(("x",), ("y",)))


def test_shapes() -> None:
    widths = {"x": 12, "y": 0}
    assert check_shapes({}, widths) == {"x": (12,), "y": ()}
    assert check_shapes({"x": (2, 3, 2)}, widths) == {"x": (2, 3, 2), "y": ()}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": (2,)}, "shapes names 'z'"),
        ({"x": (5, 2)}, r"shape \(5, 2\) of 10 elements, but its rows hold 12 elements"),
        ({"y": (1,)}, "hold a single number"),
    ],
)
def test_shapes_are_checked(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_shapes(shapes, {"x": 12, "y": 0})


def test_names_are_quoted_for_spark() -> None:
    assert quoted("a.b`c") == "`a.b``c`"
