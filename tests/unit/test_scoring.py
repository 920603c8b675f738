"""What a scorer is given, as arrays, frames and tables; no Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from horovod_spark_runner import DataError, RunDirectoryError
from horovod_spark_runner.scoring import load_pipeline
from horovod_spark_runner.scoring.bundle import Bundle
from horovod_spark_runner.scoring.columns import Input, Numbers, Words
from horovod_spark_runner.scoring.scorer import Scorer
from horovod_spark_runner.scoring.vectors import VectorAssembler


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("int", np.ma.array([1, -9999], mask=[False, True]), [1, None]),
        ("double", np.ma.array([1.5, -9999.0], mask=[False, True]), [1.5, None]),
        ("boolean", np.ma.array([True, False], mask=[False, True]), [True, None]),
        ("string", np.ma.array(["a", "b"], mask=[False, True]), ["a", None]),
        ("int", np.ma.array([1, 2]), [1, 2]),
        ("array<string>", [np.ma.array(["a"]), None], [["a"], None]),
        ("boolean", pa.array([True, None]), [True, None]),
        ("int", pa.array([1, None]), [1, None]),
        ("double", np.array([[1.0], [2.0]]), [1.0, 2.0]),
        ("int", pd.Series([1, np.nan, None], dtype=object), [1, None, None]),
        ("boolean", pd.Series([True, np.nan, None], dtype=object), [True, None, None]),
        ("bigint", [2**60 + 1, float("nan")], [2**60 + 1, None]),
    ],
)
def test_what_is_masked_or_null_is_null(kind: str, given: Any, expected: list[Any]) -> None:
    column = Input("x", kind).convert(given)
    assert isinstance(column, Numbers | Words)
    assert [column.value(row) for row in range(len(column))] == expected


@pytest.mark.parametrize("kind", ["float", "double"])
def test_nan_is_a_real_number_also_among_pandas_objects(kind: str) -> None:
    column = Input("x", kind).convert(pd.Series([0.5, np.nan, None, pd.NA], dtype=object))
    assert isinstance(column, Numbers)
    assert np.isnan(column.value(1))
    assert [column.value(row) for row in (0, 2, 3)] == [0.5, None, None]


def test_infinity_is_no_whole_number() -> None:
    for given in ([1, float("inf")], np.array([1.0, np.inf])):
        with pytest.raises(DataError, match=r"'x'.*\binf\b.*row 1.*(whole|integer)"):
            Input("x", "int").convert(given)


def test_the_value_that_does_not_fit_is_the_one_named() -> None:
    for given, told in ([-128, 128], "128.*row 1"), ([0, -129], "-129.*row 1"):
        with pytest.raises(DataError, match=f"{told}.*tinyint"):
            Input("x", "tinyint").convert(np.array(given))


@pytest.mark.parametrize("given", [np.zeros((2, 5)), [[0.0] * 5] * 2])
def test_an_array_of_another_size_is_null_however_it_is_given(given: Any) -> None:
    valid = Input("x", "array", 4).convert(given).valid
    assert valid is not None
    assert not valid.any()
    with pytest.raises(DataError, match=r"5\b.*\b4"):
        Input("x", "vector", 4).convert(given)


def test_an_array_with_a_masked_element_is_none() -> None:
    whole = np.ma.array([[1.0, 2.0], [3.0, 4.0]], mask=[[False, True], [False, False]])
    for given in (whole, list(whole)):
        column = Input("x", "array", 2).convert(given)
        assert column.value(0) is None
        assert column.value(1).tolist() == [3.0, 4.0]
        with pytest.raises(DataError, match=r"'x'.*\[1.0, None\].*row 0"):
            Input("x", "vector", 2).convert(given)


@pytest.fixture
def scorer() -> Scorer:
    stage = VectorAssembler(inputs=("f",), output="v", handle_invalid="keep")
    return Scorer(Bundle((Input("f", "double"),), (stage,)))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (lambda: {"f": np.ones((3, 2))}, r"'f'.*array\(\[1., 1.\]\).*row 0"),
        (lambda: {"f": np.array(1.0)}, "'f'.*sequence"),
        (lambda: pd.DataFrame([[1.0, 2.0]], columns=["f", "f"]), "columns.*'f'"),
        (lambda: pa.table([[1.0], [2.0]], ["f", "f"]), "columns.*'f'"),
        (lambda: {"f": np.array(["1.5"])}, "'f'.*'1.5'.*row 0"),
        (lambda: {"f": [1, 10**400]}, r"'f'.*\b10+\b.*row 1.*double"),
        (lambda: pd.DataFrame({0: [1.0], "g": [2.0]}), r"'f'.*\['0', 'g'\]"),
    ],
)
def test_what_is_no_column_is_named(scorer: Scorer, rows: Callable[[], Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        scorer.score(rows())


def test_columns_of_the_rows_own_come_back_as_they_were(scorer: Scorer) -> None:
    made = scorer.score(
        {"f": np.ones((2, 1)), "id": np.ma.array([1, 2], mask=[False, True])}, ["v", "id"]
    )
    assert made["v"].tolist() == [[1.0], [1.0]]
    assert made["id"].tolist() == [1, None]
    batch = pa.record_batch({"f": pa.array([1.0, None]), "b": pa.array([True, None])})
    assert scorer.score(batch, ["b", "v"])["b"].to_pylist() == [True, None]


def test_a_file_of_a_bundle_is_not_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "pipeline.json").touch()
    with pytest.raises(RunDirectoryError, match="pipeline.json.*file.*folder"):
        load_pipeline(tmp_path / "pipeline.json")
    (tmp_path / "else" / "pipeline.json").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="else.*Is a directory"):
        load_pipeline(tmp_path / "else")
