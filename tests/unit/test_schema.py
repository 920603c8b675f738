"""Roles, shapes and observed values, without Spark."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from horovod_spark_runner.config.data import DataOptions
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.prepare import checks
from horovod_spark_runner.data.prepare.checks import Footer, _faults, _Matches, check_values
from horovod_spark_runner.data.prepare.columns import Layout, Source, columns_of
from horovod_spark_runner.data.prepare.fingerprint import (
    _file_facts,
    _is_reproducible,
    _plan_text,
    _relations,
)
from horovod_spark_runner.data.prepare.schema import (
    Roles,
    check_named,
    check_roles,
    check_shape,
    quoted,
)
from horovod_spark_runner.errors import DataError, InvalidInputError


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (Roles((), ("y",)), "feature_cols"),
        (Roles(("a", "a"), ("y",)), "feature_cols.*'a'"),
        (Roles(("b",), ("y",)), "'b'.*'a', 'y', 'd', 'd', 'Q', 'q'"),
        (Roles(("a",), ("z",)), "column 'z'"),
        (Roles(("a",), ("y",), "w"), "column 'w'"),
        (Roles(("A",), ("y",)), "column 'A'"),
        (Roles(("a.b",), ("y",)), "'a.b'.*struct"),
        (Roles(("d",), ("y",)), "columns.*'d'"),
        (Roles(("a",), ("q",)), "columns.*'Q', 'q'.*Spark"),
    ],
)
def test_roles_are_checked(roles: Roles, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_roles(roles, ["a", "y", "d", "d", "Q", "q"])


def test_a_column_may_have_several_parts() -> None:
    for roles, columns in (
        (Roles(("a",), ("a",)), ("a",)),
        (Roles(("a", "b"), ("y", "y", "b"), "y"), ("a", "b", "y")),
        (Roles(("a",), (), "a"), ("a",)),
        (Roles(("a",), ()), ("a",)),
    ):
        check_roles(roles, ["y", "b", "a"])
        assert roles.columns == columns
    check_roles(Roles(("q",), ("Q",)), ["Q", "q"], case_sensitive=True)


SOURCES = (Source("x", "array", "double", "float32", 1), Source("y", "scalar", "long", "int64"))
GOOD = {"rows": 9, "min0_1": 4, "max0_1": 4}
CLEAN = {"x": Footer(0), "y": Footer(0)}


def test_layouts() -> None:
    assert check_values(SOURCES, GOOD, CLEAN, None) == {"x": Layout((4,)), "y": Layout()}


@pytest.mark.parametrize(
    ("facts", "footers", "message"),
    [
        ({"rows": 0}, {}, "no rows"),
        ({}, {"y": Footer(3)}, "'y'.*null.*df.fillna"),
        ({}, {"x": Footer(3)}, "'x'.*null(?!.*fillna).*df.dropna"),
        ({"min0_1": 3}, {}, r"'x'.*\b3\b.*\b4\b"),
    ],
)
def test_values_are_checked(facts: dict[str, Any], footers: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_values(SOURCES, {**GOOD, **facts}, {**CLEAN, **footers}, None)


@pytest.mark.parametrize(
    ("facts", "footer", "had"),
    [
        ({}, Footer(3), "3 .*null.*int64"),
        ({}, Footer(0, finite=False, infinite=True), "NaN"),
        ({"negative1": 2}, Footer(0), "2 negative"),
    ],
    ids=["null", "infinite", "negative"],
)
def test_faults_are_not_forgotten_where_rows_change(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], footer: Footer, had: str
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(checks, "_refuse_fault", lambda *args: looked.append(args[2].title))
    with pytest.raises(DataError, match=f"'y'.*{had}"):
        check_values(SOURCES, {**GOOD, **facts}, {**CLEAN, "y": footer}, None)
    assert looked
    unknown = {**CLEAN, "y": Footer(0, finite=False)}
    assert check_values(SOURCES, GOOD, unknown, None)  # computing them again tells


@pytest.mark.parametrize("kind", ["array", "vector", "scalar"])
def test_advice_reaches_into_arrays(kind: str) -> None:
    source = Source("v", kind, "double", "float32", int(kind == "array"))
    advice = {fault.title: fault.advice for fault in _faults(source, allow_nan=False)}
    (not_finite,) = [text for title, text in advice.items() if "NaN" in title]
    assert "allow_nan=True" in not_finite
    assert "df.filter" in not_finite
    assert "dropna" not in not_finite
    if kind != "scalar":
        assert re.search(rf"df\.filter.*{kind}s", not_finite)
    if kind == "array":
        (with_null,) = [text for title, text in advice.items() if "null element" in title]
        assert re.search(r"df\.filter.*arrays", with_null)


def test_a_place_shows_the_row() -> None:
    place = _Matches(9, 2, 5, {"id": 7, "name": "x" * 99})
    assert place.describe() == f"row 5 (id=7, name='{'x' * 39})"


IMAGE, RAW = Source("i", "binary", "binary", ""), Source("r", "binary", "binary", "float32")


def layout_of(source: Source, layout: Layout, shape: tuple[int, ...] | None) -> Column:
    shapes = {} if shape is None else {source.name: shape}
    (column,) = columns_of([source], {source.name: layout}, shapes, lambda name: b"no image")
    return column


def test_columns_have_the_shape_of_their_values_or_the_one_asked_for() -> None:
    nested = Source("x", "array", "double", "float64", 2)
    assert layout_of(nested, Layout((2, 3)), None) == Column("x", "float64", (2, 3))
    assert layout_of(nested, Layout((2, 3)), (6, 1)) == Column("x", "float64", (6, 1))
    assert layout_of(RAW, Layout((24,), "raw"), (2, 3)) == Column("r", "float32", (2, 3), "raw")


@pytest.mark.parametrize(
    ("source", "layout", "shape", "message"),
    [
        (RAW, Layout((25,), "raw"), None, "25 bytes.*float32"),
        (RAW, Layout((24,), "raw"), (5,), r"shape .5,.*\b5\b.*\b6"),
        (IMAGE, Layout((), "image"), None, "encoded images.*size"),
        (IMAGE, Layout((), "image"), (8, 8, 2), "1, 3 or 4 channels"),
        (IMAGE, Layout((), "image"), (8, 8, 3), "image.*decode"),
        (IMAGE, Layout((), "npy"), None, "npy array"),
        (SOURCES[0], Layout((0,)), None, "empty array"),
    ],
)
def test_columns_that_cannot_be_read(
    source: Source, layout: Layout, shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        layout_of(source, layout, shape)


def plan(*names: str) -> str:
    return ",".join(f'{{"class":"org.apache.spark.sql.{name}"}}' for name in names)


PROJECT, RELATION = "catalyst.plans.logical.Project", "execution.datasources.LogicalRelation"


@pytest.mark.parametrize(
    ("names", "reproducible"),
    [
        ((PROJECT, "catalyst.expressions.Multiply", RELATION), True),
        ((PROJECT, "catalyst.expressions.PythonUDF", RELATION), False),
        ((PROJECT, "catalyst.expressions.ScalaUDF", RELATION), False),
        (("catalyst.plans.logical.Generate", "catalyst.expressions.PythonUDTF", RELATION), False),
        ((PROJECT, "catalyst.expressions.CurrentDate", RELATION), False),
        (("catalyst.plans.logical.GlobalLimit", RELATION), False),
        ((PROJECT, "execution.LogicalRDD"), False),
        ((PROJECT, "catalyst.plans.logical.MapInArrow", RELATION), False),
    ],
)
def test_which_plans_compute_the_same_every_time(
    names: tuple[str, ...], reproducible: bool
) -> None:
    assert _is_reproducible(plan(*names)) == reproducible


@pytest.mark.parametrize(
    ("index", "reliable"),
    [
        ("execution.datasources.InMemoryFileIndex", True),
        ("execution.datasources.CatalogFileIndex", True),
        # By the table's version: a deletion vector takes rows from a file whose facts stay.
        ("delta.files.TahoeLogFileIndex", True),
        ("hudi.HoodieFileIndex", False),
    ],
)
def test_files_or_a_version_tell_the_rows(index: str, reliable: bool) -> None:
    plan = MagicMock()
    plan.collectLeaves().size.return_value = 1
    leaf = plan.collectLeaves().apply(0)
    leaf.getClass().getSimpleName.return_value = "LogicalRelation"
    relation = leaf.relation()
    relation.getClass().getSimpleName.return_value = "HadoopFsRelation"
    relation.location().getClass().getName.return_value = f"org.apache.spark.sql.{index}"
    relation.options().iterator().hasNext.return_value = False
    assert (_relations(plan) is not None) == reliable


def test_threads_that_look_at_plans_leave_the_session_as_it_was() -> None:
    values: dict[str, str] = {}
    conf = MagicMock(get=values.get, set=values.__setitem__, unset=values.pop)
    frame, plan = MagicMock(), MagicMock()
    frame.sparkSession.conf = conf

    def text() -> str:
        time.sleep(0.05)  # the other one begins meanwhile, and ends later
        return str(list(values.values()))

    plan.canonicalized().toString = text
    plan.canonicalized().toJSON.return_value = ""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(_plan_text, frame, plan)
        time.sleep(0.02)
        second = pool.submit(_plan_text, frame, plan)
    assert first.result() == second.result() == "['2147483647']"
    assert values == {}


def test_files_without_a_time_of_change_do_not_tell_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text("1")
    assert _file_facts([file.as_uri()]) is not None
    os.utime(file, (0, 0))  # as storage says that knows none
    assert _file_facts([file.as_uri()]) is None


@pytest.mark.parametrize(
    ("shape", "width", "message"),
    [
        ((2, 3, 2), 12, None),
        ((), 0, None),
        ((5, 2), 12, r"\(5, 2\).*\b10\b.*\b12\b"),
        ((1,), 0, "single number"),
    ],
)
def test_shapes_are_checked(shape: tuple[int, ...], width: int, message: str | None) -> None:
    with contextlib.nullcontext() if message is None else pytest.raises(DataError, match=message):
        check_shape("x", shape, width)


def test_names_are_quoted_for_spark() -> None:
    assert quoted("a.b`c") == "`a.b``c`"


def test_options_become_plain() -> None:
    options = DataOptions(
        shapes={"a": 2, "b": [np.int64(2), 3], "c": np.array([4, 1])},
        dtypes={"a": np.float32, "b": np.dtype("int8"), "c": "float64", "s": str},
    )
    assert options.shapes == {"a": (2,), "b": (2, 3), "c": (4, 1)}
    assert options.dtypes == {"a": "float32", "b": "int8", "c": "float64", "s": "string"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": {"i": (0, 8, 1)}}, r"'i'.*\(0, 8, 1\)"),
        ({"shapes": {"i": (None, 8, 1)}}, r"\b1\b.*rows"),
        ({"shapes": {"i": (-1, 8)}}, r"\b1"),
        ({"shapes": {"i": (8.0, 8)}}, r"\b1"),
        ({"shapes": {"i": "88"}}, r"\b1"),
        ({"shapes": {"i": None}}, r"\b1"),
        ({"shapes": [2]}, r"shapes.*dict.*\[2\]"),
        ({"dtypes": {"i": object()}}, "dtypes.*'i'.*type"),
        ({"dtypes": "float32"}, "dtypes.*dict"),
        ({"dtypes": {"i": None}}, "'i'.*None"),
        (
            {"transforms": {"i": lambda value: value}},
            r"'i'.*\(value\)",
        ),
        ({"transforms": {"i": lambda value, rng, more: value}}, "'more'"),
        ({"transforms": {"i": lambda *, value, rng: value}}, "takes"),
        ({"transforms": {"i": 3}}, r"transforms.*'i'.*\b3\b.*function"),
        ({"allow_nan": "no"}, "allow_nan.*'no'"),
        ({"keep_data": 2}, r"keep_data.*\b2"),
        ({"data_dir": ""}, "data_dir"),
        ({"transforms": len}, "transforms.*dict"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        DataOptions(**options)


def test_functions_that_take_two_values_are_transforms() -> None:
    transforms: dict[str, Any] = {
        "a": lambda value, rng: value,
        "b": lambda *values: values[0],
        "c": lambda value, rng=None, more=1: value,
        "d": functools.partial(lambda more, value, rng: value, 1),
        "e": np.add,  # these do not tell
        "f": max,
    }
    assert DataOptions(transforms=transforms).transforms == transforms


@pytest.mark.parametrize("argument", ["dtypes", "shapes", "transforms"])
def test_arguments_by_column_name_columns_there_are(argument: str) -> None:
    check_named(argument, {"a": 1}, Roles(("a",), ()))
    with pytest.raises(DataError, match=f"{argument}.*'z'.*feature"):
        check_named(argument, {"z": 1}, Roles(("a",), ("y",)))
    with pytest.raises(DataError, match=f"{argument}.*'z'.*'a', 'b'"):
        check_named(argument, {"z": 1}, Roles(("a", "b"), (), labelled=False))
