"""Rows that models are tried with: which are chosen, how many are kept, and in what file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import ModelError
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.training.sample_rows import (
    SAMPLE_COUNT,
    SampleRows,
    choose_rows,
    few_rows,
    finite_rows,
    repeat_rows,
)
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.trained_model import ModelInputs

X, N, T = Column("x", "float32", (2,)), Column("n", "int32"), Column("t", "string", (2,))
COLUMNS = (X, N, T)
ROWS = {
    "x": np.arange(6, dtype=np.float32).reshape(3, 2),
    "n": np.array([3, 1, 2], np.int32),
    "t": np.array([["a", "Ä\0"], ["", "\ud800"], ["b", "c"]], object),
}


def total(rows: Any) -> list[np.ndarray]:
    return [rows["x"].sum(1) + rows["n"], rows["t"][:, 0]]


def test_a_file_holds_numbers_and_strings() -> None:
    found = SampleRows.load(SampleRows.of(total, ROWS).dump())
    for name, array in ROWS.items():
        assert found.inputs[name].dtype == array.dtype
        np.testing.assert_array_equal(found.inputs[name], array)
    assert found.fits(COLUMNS)
    assert not found.fits(COLUMNS[:2])
    found.check(total)
    with pytest.raises(ModelError, match=r"output 0 is .*7\.,.* was .*4\."):
        found.check(lambda rows: [rows["x"].sum(1) + 2 * rows["n"], rows["t"][:, 0]])
    with pytest.raises(ModelError, match="output 1"):
        found.check(lambda rows: [total(rows)[0], rows["t"][:, 1]])


def test_outputs_that_are_random_are_not_kept() -> None:
    random = np.random.default_rng(0)
    assert not SampleRows.of(lambda rows: [random.random(3)], ROWS).outputs


def test_few_rows_are_kept_and_of_large_ones_one() -> None:
    many = repeat_rows(ROWS, 100)
    assert {len(array) for array in few_rows(many).values()} == {SAMPLE_COUNT}
    large: Any = {"x": np.zeros((5, 2_000_000), np.float32), "n": np.arange(5)}
    assert {len(array) for array in few_rows(large).values()} == {1}
    texts: Any = {"t": np.array(["ä" * 1_500_000] * 5, object)}
    assert few_rows(texts)["t"].shape == (2,)


def test_rows_that_are_given_come_first() -> None:
    assert choose_rows(COLUMNS, ROWS, total) is ROWS
    equal = repeat_rows({name: array[:1] for name, array in ROWS.items()}, 3)
    made = choose_rows(COLUMNS, equal, total)
    assert len(np.unique(made["x"])) > 2
    assert set(made["n"]) == {0, 1}

    def positive(rows: Any) -> list[np.ndarray]:
        if (rows["x"] < 0).any():
            raise ValueError("below 0")
        return total(rows)

    assert choose_rows(COLUMNS, None, positive)["x"].min() >= 0

    def three(rows: Any) -> list[np.ndarray]:
        if (rows["n"] != 3).any():
            raise ValueError("other than 3")
        return total(rows)

    assert choose_rows(COLUMNS, equal, three) is equal
    with pytest.raises(ValueError, match="other than 3"):
        choose_rows(COLUMNS, None, three)


def test_rows_may_be_kept_back() -> None:
    takes = ModelInputs(Binding(["x", "n", "t"]), COLUMNS, (), sample=ROWS, keep_sample=False)
    kept = takes.saved_rows(total, takes.choose_rows(total))
    assert kept is not None
    assert not np.isin(ROWS["x"][1:], kept.inputs["x"]).any()


def test_rows_of_finite_numbers_are_found() -> None:
    rows = {"x": np.array([[1, np.nan], [2, 3]], np.float32)}
    found = finite_rows(rows, 4, lambda given: [given["x"].sum(1)])
    np.testing.assert_array_equal(found["x"], [[2, 3], [2, 3]])
    with pytest.raises(ModelError, match="NaN"):
        finite_rows({"x": rows["x"][:1]}, 4, lambda given: [given["x"].sum(1)])
