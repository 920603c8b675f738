"""Rows that no prediction can be made of, and names of the added columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_spark_runner.config.prediction import PredictionSettings, added_columns
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.errors import DataError, InvalidInputError, ModelError
from horovod_spark_runner.model import inference
from horovod_spark_runner.model.evaluate import _choose_targets
from horovod_spark_runner.model.evaluate_task import Evaluation
from horovod_spark_runner.model.features import feature_array
from horovod_spark_runner.model.inference import (
    _describe_fault,
    _join_small_arrays,
    _output_array,
    _valid_rows,
    _with_nulls,
)
from horovod_spark_runner.model.outputs import check_added, check_classes
from horovod_spark_runner.training.spec import Binding, OutputSpec
from horovod_spark_runner.training.trained_model import Targets

LISTS = [[9, 9], [1, 2], None, [3], [4, None], [5, 6], [], [None, None], [7, 8, 9]]
PAIR = Column("x", "float32", (2,))


@pytest.mark.parametrize("begin", [0, 1, 3])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists(kind: Any, begin: int) -> None:
    array = pa.array(LISTS, kind(pa.float32())).slice(begin)
    expected = [value is not None and len(value) == 2 and None not in value for value in LISTS]
    found = _valid_rows(array, PAIR)
    assert found is not None
    assert found.tolist() == expected[begin:]


def test_lists_of_fixed_size() -> None:
    given = [[1, 2], None, [3, None], [5, 6]]
    array = pa.array([[0, 0], *given], pa.list_(pa.float32(), 2)).slice(1)
    found = _valid_rows(array, PAIR)
    assert found is not None
    assert found.tolist() == [True, False, False, True]


@pytest.mark.parametrize("begin", [0, 1, 2])
@pytest.mark.parametrize("number", [pa.float32(), pa.float64()])
def test_lists_of_fixed_size_from_a_file(number: pa.DataType, begin: int) -> None:
    """Behind its nulls, such a list has values."""
    given = [None, [1, 2], None, [3, None], [5, 6]]
    valid = np.array([False, True, False, False, True])[begin:]
    kept = [one for one, right in zip(given[begin:], valid, strict=True) if right]
    flat = pa.array(given, pa.list_(number, 2))
    array = feature_array(flat.slice(begin), PAIR)
    np.testing.assert_array_equal(_valid_rows(array, PAIR), valid)
    assert array.filter(pa.array(valid)).to_pylist() == kept
    pairs = [None if one is None else [one] for one in given]
    nested = pa.array(pairs, pa.list_(pa.list_(number, 2), 1))
    column = Column("x", "float32", (1, 2))
    array = feature_array(nested.slice(begin), column)
    np.testing.assert_array_equal(_valid_rows(array, column), valid)
    assert array.filter(pa.array(valid)).to_pylist() == kept
    # Null within, and not as a whole.
    nested = pa.array([[one] for one in given], pa.list_(pa.list_(number, 2), 1)).slice(begin)
    array = feature_array(nested, column)
    np.testing.assert_array_equal(_valid_rows(array, column), valid)
    assert array.filter(pa.array(valid)).to_pylist() == kept


@pytest.mark.parametrize("nullable", [True, False])
def test_lists_of_the_models_type_are_not_copied(nullable: bool) -> None:
    """Also where the file says that no element is null, as Spark writes what it computes."""
    kind = pa.list_(pa.field("element", pa.float32(), nullable=nullable))
    array = pa.array([[1, 2], None, [3, 4]], kind)
    given = feature_array(array, PAIR)
    assert given.values.buffers()[1].address == array.values.buffers()[1].address
    assert given.to_pylist() == array.to_pylist()


@pytest.mark.parametrize(
    ("values", "column"),
    [
        (pa.array([1, 2]), Column("x", "int64")),
        (pa.array([[1.0, 2.0], [3.0, float("nan")]]), PAIR),
        (pa.array([b"12345678"]), Column("x", "float32", (2,), "raw")),
        (pa.array([b"1"]), Column("x", "uint8", (2, 2), "image")),
        (pa.array(["a", ""]), Column("x", "string")),
        (pa.array([], pa.list_(pa.float32())), PAIR),
    ],
)
def test_nothing_is_wrong(values: Any, column: Column) -> None:
    assert _valid_rows(values, column) is None


def test_faults_are_described() -> None:
    array = pa.array(LISTS, pa.list_(pa.float32()))
    raw = Column("x", "float32", (2,), "raw")
    only_null = "'x'(?!.*(array|element|float64|string)).*null"
    assert re.search(only_null, _describe_fault(array, PAIR, 2))
    assert re.search(r"'x'.*\b1\b.*\b2", _describe_fault(array, PAIR, 3))
    assert re.search("'x'.*array.*null element", _describe_fault(array, PAIR, 4))
    nested = Column("x", "float32", (1, 2))
    assert re.search("'x'.*null.*nested", _describe_fault(array, nested, 2))
    whole = Column("x", "int32")
    assert re.search("'x'.*null.*int32", _describe_fault(pa.array([None, 1]), whole, 0))
    real = Column("x", "float64")
    assert re.search(only_null, _describe_fault(pa.array([None, 1.0]), real, 0))
    pair = Column("x", "int32", (2,))
    fault = _describe_fault(pa.array([[1, None]]), pair, 0)
    assert re.search("'x'.*array.*element.*null.*int32", fault)
    assert re.search(r"'x'.*\b3 bytes.*\b8", _describe_fault(pa.array([b"123"]), raw, 0))
    assert _valid_rows(pa.array([b"123", None]), raw).tolist() == [False, False]  # type: ignore[union-attr]
    text = Column("x", "string")
    assert re.search(only_null, _describe_fault(pa.array([None], pa.string()), text, 0))


@pytest.mark.parametrize("kind", ["number", "list", "struct"])
def test_predictions_go_to_their_rows(kind: str) -> None:
    values: Any = {"number": [1, 2], "list": [[1], [2]], "struct": [{"a": 1}, {"a": 2}]}[kind]
    valid = np.array([False, True, False, True, False])
    assert _with_nulls(pa.array(values), valid).to_pylist() == [
        None, values[0], None, values[1], None
    ]  # fmt: skip
    assert _with_nulls(pa.array(values).slice(0, 0), valid & False).to_pylist() == [None] * 5


def test_large_predictions_are_not_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all 10,000 rows that Spark gives at once may be more than a list can count."""
    monkeypatch.setattr(inference, "_MESSAGE_BYTES", 30)
    made = []

    def each() -> Iterator[pa.Array]:
        for number in range(5):
            made.append(number)
            yield pa.array([number] * 2, pa.int64())

    given = _join_small_arrays(each())
    assert (next(given).to_pylist(), made) == ([0, 0, 1, 1], [0, 1])
    assert [array.to_pylist() for array in given] == [[2, 2, 3, 3], [4, 4]]
    assert list(_join_small_arrays([])) == []
    output = OutputSpec("mask", (2**30,), "int8")
    values = np.broadcast_to(np.zeros(1, np.int8), (3, 2**30))
    with pytest.raises(ModelError, match="'mask'.*3221225472.*predictBatchSize"):
        _output_array(values, output)


@pytest.mark.parametrize("given", [5, "", [], {}, [1], {"a": None}, b"x"])
def test_what_is_no_column_name(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="prediction_col"):
        PredictionSettings(prediction_col=given)


@pytest.mark.parametrize(
    ("given", "one", "two"),
    [
        (None, ["prediction"], ["u", "v"]),
        ("p", ["p"], ["p_u", "p_v"]),
        ({"u": "a"}, None, ["a", "v"]),
        ({"prediction": "a"}, ["a"], None),
        (["a", "b"], None, ["a", "b"]),
        (["a"], ["a"], None),
    ],
)
def test_names(given: Any, one: Any, two: Any) -> None:
    for outputs, expected in ((["prediction"], one), (["u", "v"], two)):
        if expected is None:
            with pytest.raises(InvalidInputError, match="prediction_col.*outputs"):
                added_columns(outputs, given)
        else:
            assert added_columns(outputs, given) == expected


def test_names_that_are_taken() -> None:
    plain, two = PredictionSettings(), ["u", "U"]
    check_added(["A"], ["a"], plain, by_case=True)
    check_added(two, ["x"], plain, by_case=True, outputs=two)
    with pytest.raises(DataError, match="'a'.*prediction_col=\"…\"$"):
        check_added(["A"], ["a"], plain, by_case=False)
    told = "'U'.*prediction_col={'u': 'predicted_u', 'U': 'pre"
    with pytest.raises(DataError, match=told):
        check_added(two, ["x"], plain, by_case=False, outputs=two)
    # What is advised is what names the column.
    of_classes = PredictionSettings(prediction_col="p", probability_col={"out": "P"})
    with pytest.raises(DataError, match="'P'.*probability_col={'out': \"…\"}$"):
        check_added(["p", "P"], ["x"], of_classes, by_case=False)
    in_scores = PredictionSettings(raw_prediction_col="raw")
    with pytest.raises(DataError, match="'raw'.*raw_prediction_col=\"…\"$"):
        check_added(["prediction", "raw"], ["raw"], in_scores, by_case=True, outputs=["o"])


def test_classes_that_a_model_cannot_give() -> None:
    spec = OutputSpec("out", (3,), "float32", activation="linear")
    asked = PredictionSettings(probability_col="p")
    # Given one after the other, the Params of a model may lack the second yet.
    check_classes([spec], asked)
    with pytest.raises(InvalidInputError, match="'linear'.*raw_pred"):
        check_classes([spec], asked, whole=True)
    check_classes([spec], replace(asked, raw_prediction_col="r"), whole=True)


def test_one_label_of_several_outputs_stays_one() -> None:
    """Given two columns, both outputs would be compared with the last one."""
    label = Column("y", "float32")
    trained = Targets(Binding((("y",), ("y",)), ("main", "help")), (label,))
    for given in (["a", "a"], {"main": "a", "help": "a"}):
        assert _choose_targets(trained, given, None) == (trained, ("a",))
    for given in (["a", "b"], {"main": "a", "help": "b"}, {"main": "a"}):
        with pytest.raises(InvalidInputError, match="'a'.*'[by]'.*outputs.*'y'"):
            _choose_targets(trained, given, None)


def test_an_evaluation_decodes_no_more_rows_than_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark hands over 10,000 rows at once: as images, more than memory holds."""
    decoded: list[int] = []
    computed: list[int] = []

    class Rows:
        def begin(self) -> None:
            pass

        def update(self, features: Any, labels: Any) -> np.ndarray:
            computed.append(len(features["x"]))
            assert len(decoded) == sum(computed)
            return np.zeros(len(features["x"]))

        def take_sums(self) -> list[np.ndarray]:
            return [np.zeros(1)]

    def decode(value: np.ndarray, rng: Any) -> np.ndarray:
        if value == 9:
            raise ValueError("nine")
        decoded.append(int(value))
        return value

    columns, labels = (Column("x", "float32"),), (Column("y", "float32"),)
    monkeypatch.setattr(Evaluation, "_loaded", lambda self: (Rows(), {"x": decode}))
    predictor = inference.Predictor("", lambda: None, columns, (), 3, inference.SKIP)  # type: ignore[arg-type, return-value]
    evaluation = Evaluation(predictor, labels, ("y",), b"", None, "y")
    x = pa.array([0, None, 1, 2, 3, 4, 5, 6, 7], pa.float32())
    batch = pa.RecordBatch.from_pydict({"x": x, "y": pa.array(np.arange(9), pa.float32())})
    each = [told["label"] for out in evaluation.add_up(iter([batch])) for told in out.to_pylist()]
    assert computed == [3, 3, 2]
    assert each == [[0.0], *([float(y)] for y in range(2, 9)), None]
    x = pa.array([0, None, 1, 2, 9], pa.float32())
    batch = pa.RecordBatch.from_pydict({"x": x, "y": pa.array(np.arange(5), pa.float32())})
    with pytest.raises(DataError, match=r"row 4\b.*\b5\b.*ValueError: nine"):
        list(evaluation.add_up(iter([batch])))
