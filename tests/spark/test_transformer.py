"""The transformer on real DataFrames: names, nulls, types, sessions, copies, files."""

from __future__ import annotations

import copy
import glob
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_spark_runner import DataError, InvalidInputError, ModelError, TFTransformer
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.training.spec import Binding

from ..runs import save_run

pytestmark = pytest.mark.spark

SCHEMA = "id int, x array<float>, n int"
ROWS = [(i, [float(i), 1.0, -float(i)], i % 5) for i in range(40)]


def layers_of() -> Any:
    import keras

    return keras.layers


def summing(outputs: int) -> Any:
    """A model that can be computed by hand: sums of x and n, and x twice."""
    import keras

    x, n = keras.Input((3,), name="x"), keras.Input((1,), name="n")
    total = keras.ops.sum(x, axis=1, keepdims=True) + n
    given = {"total": total, "Twice": x * 2}
    model = keras.Model({"x": x, "n": n}, given if outputs == 2 else total)
    model.compile("sgd", "mse")
    return model


COLUMNS = [Column("x", "float32", (3,)), Column("n", "int32")]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("one")
    save_run(place, summing(1), COLUMNS)
    return str(place)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("two")
    save_run(place, summing(2), COLUMNS)
    return str(place)


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, SCHEMA).repartition(2).cache()


def expected(row: Any) -> float:
    return float(sum(row.x) + row.n)


def test_what_is_taken_for_a_dataframe(one: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(one)
    for data, advice in ((frame.toPandas(), "createDataFrame"), (frame.pandas_api(), "to_spark")):
        for call in (transformer.transform, transformer.evaluate):
            with pytest.raises(DataError, match=rf"Spark DataFrame.*\.{advice}\("):
                call(data)


def check(rows: list[Any], name: str = "prediction") -> None:
    assert len(rows) == len(ROWS)
    for row in rows:
        assert row[name] == pytest.approx(expected(row))


@pytest.mark.thorough
def test_copies_predict_after_transform_was_called(one: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(one)
    check(transformer.transform(frame).collect())
    for again in (
        pickle.loads(pickle.dumps(transformer)),
        cloudpickle.loads(cloudpickle.dumps(transformer)),
        copy.deepcopy(transformer),
        transformer.copy(),
    ):
        assert again.summary.history == transformer.summary.history
        check(again.transform(frame).collect())


def test_a_dataframe_outlives_its_transformer(one: str, frame: Any) -> None:
    import gc

    predicted = TFTransformer.from_run(one).transform(frame)
    gc.collect()
    frame.sparkSession._jvm.System.gc()
    check(predicted.collect())


def test_names_of_one_output(one: str, frame: Any) -> None:
    taken = frame.withColumnRenamed("id", "Prediction")
    with pytest.raises(DataError, match="'Prediction'.*prediction_col="):
        TFTransformer.from_run(one).transform(taken)
    named = TFTransformer.from_run(one, prediction_col="a `b.c`")
    predicted = named.transform(taken)
    assert predicted.columns == ["Prediction", "x", "n", "a `b.c`"]
    check(predicted.collect(), "a `b.c`")


def test_names_of_several_outputs(two: str, frame: Any) -> None:
    labelled = frame.withColumnRenamed("id", "TOTAL")
    transformer = TFTransformer.from_run(two)
    assert transformer.output_names == ["total", "Twice"]
    with pytest.raises(DataError, match=r"'TOTAL'.*prediction_col=\{'total': 'predicted_total'"):
        transformer.transform(labelled)
    for given, names in (
        ({"total": "sum"}, ["sum", "Twice"]),
        ("p", ["p_total", "p_Twice"]),
        (["u", "v"], ["u", "v"]),
    ):
        transformer.setPredictionCol(given)
        predicted = transformer.transform(labelled)
        assert predicted.columns == ["TOTAL", "x", "n", *names]
    check(predicted.collect(), "u")
    transformer.setPredictionCol({"totl": "sum"})
    with pytest.raises(InvalidInputError, match="'totl'.*'total', 'Twice'"):
        transformer.transform(labelled)
    transformer.setPredictionCol(["a", "A"])
    with pytest.raises(DataError, match="'A'"):
        transformer.transform(labelled)


def test_columns_with_backticks_and_columns_of_one_name_stay(two: str, frame: Any) -> None:
    odd = frame.selectExpr("*", "id as `a``b`", "1 as same", "2 as same", "3 as `a.b`")
    rows = TFTransformer.from_run(two).transform(odd).collect()
    assert rows[0].__fields__ == [
        "id", "x", "n", "a`b", "same", "same", "a.b", "total", "Twice"
    ]  # fmt: skip
    for row in rows:
        assert list(row)[4:7] == [1, 2, 3]
        assert list(row.Twice) == pytest.approx([2 * v for v in row.x])
    check(rows, "total")


def test_feature_columns_that_spark_cannot_tell_apart(one: str, frame: Any) -> None:
    with pytest.raises(DataError, match="'x'.*'X'"):
        TFTransformer.from_run(one).transform(frame.selectExpr("*", "x as X"))
    nested = frame.selectExpr("struct(x) as s")
    with pytest.raises(DataError, match=r"'s.x'.*df.withColumn\("):
        TFTransformer.from_run(one).setFeatureCols(["s.x", "n"]).transform(nested)


BROKEN = [
    (100, None, 1, "'x'.{0,12}null"),
    (101, [1.0, 2.0], 1, r"'x'.*array.*\b2\b.*\b3"),
    (102, [1.0, None, 2.0], 1, "'x'.*array.*null"),
    (103, [1.0, 2.0, 3.0], None, "'n'.*null.*int32"),
    (104, [1.0, 2.0, 3.0], 2**40, "'n'.*null.*int32"),
]


@pytest.fixture(scope="module")
def holes(spark: Any) -> Any:
    rows = [*ROWS[:20], *(row[:3] for row in BROKEN), *ROWS[20:]]
    return spark.createDataFrame(rows, "id int, x array<float>, n bigint").coalesce(1).cache()


@pytest.mark.parametrize("outputs", ["one", "two"])
@pytest.mark.parametrize("pandas", [False, True])
def test_invalid_rows_are_kept_or_left_out(
    outputs: str,
    pandas: bool,
    holes: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if pandas:
        monkeypatch.delattr("pyspark.sql.functions.arrow_udf")
    place = request.getfixturevalue(outputs)
    name = "prediction" if outputs == "one" else "total"
    keep = TFTransformer.from_run(place, handle_invalid="keep", predict_batch_size=7)
    rows = keep.transform(holes).collect()
    assert len(rows) == len(ROWS) + len(BROKEN)
    assert {row.id for row in rows if row[name] is None} == {row[0] for row in BROKEN}
    check([row for row in rows if row.id < 100], name)
    keep.setHandleInvalid("skip")
    check(keep.transform(holes).collect(), name)


@pytest.mark.thorough
@pytest.mark.parametrize("pandas", [False, True])
def test_whole_numbers_beside_a_null_stay_exact(
    pandas: bool, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras

    if pandas:
        monkeypatch.delattr("pyspark.sql.functions.arrow_udf")
    n, a = keras.Input((1,), name="n", dtype="int64"), keras.Input((2,), name="a", dtype="int64")
    model = keras.Model({"n": n, "a": a}, keras.ops.concatenate([n, a], axis=1) + 1)
    model.compile("sgd", "mse")
    save_run(tmp_path, model, [Column("n", "int64"), Column("a", "int64", (2,))])
    large = 2**53 + 1
    rows = [(0, large, [large, -large]), (1, None, [1, 2]), (2, 5, [None, 2]), (3, 7, [8, 9])]
    frame = spark.createDataFrame(rows, "id int, n bigint, a array<bigint>").coalesce(1)
    transformer = TFTransformer.from_run(str(tmp_path), handle_invalid="keep")
    predicted = {row.id: row.prediction for row in transformer.transform(frame).collect()}
    assert predicted == {0: [large + 1, large + 1, 1 - large], 1: None, 2: None, 3: [8, 9, 10]}


@pytest.mark.thorough
@pytest.mark.parametrize("pandas", [False, True])
def test_nan_is_no_null(
    pandas: bool, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are whole numbers of the model's cut beside a row without prediction."""
    import keras

    if pandas:
        monkeypatch.delattr("pyspark.sql.functions.arrow_udf")
    r, a = keras.Input((1,), name="r"), keras.Input((2,), name="a")
    whole = keras.ops.cast(keras.ops.isnan(r), "int64") + (2**53 + 1)
    outputs = {"twice": r * 2, "whole": whole, "nans": keras.ops.isnan(a)}
    model = keras.Model({"r": r, "a": a}, outputs)
    model.compile("sgd", "mse")
    save_run(tmp_path, model, [Column("r", "float32"), Column("a", "float32", (2,))])
    nan = float("nan")
    rows = [(0, nan, [1.0, nan]), (1, None, [1.0, nan]), (2, 1.5, [nan, None]), (3, 1.5, None)]
    schema = "id int, r float, a array<float>"
    frame = spark.createDataFrame([*rows, (4, 1.5, [0.0, nan])], schema).coalesce(1)
    transformer = TFTransformer.from_run(str(tmp_path), handle_invalid="keep")
    found = {row.id: row for row in transformer.transform(frame).collect()}
    assert found[0].twice != found[0].twice
    assert (found[0].whole, found[0].nans) == (2**53 + 2, [False, True])
    assert (found[4].twice, found[4].whole, found[4].nans) == (3.0, 2**53 + 1, [False, True])
    assert all(list(found[number])[3:] == [None] * 3 for number in (1, 2, 3))
    named = TFTransformer.from_run(str(tmp_path))
    with pytest.raises(Exception, match="'a'.*array.*null.*row 1"):
        named.transform(frame.filter("id in (0, 2)")).collect()


@pytest.mark.parametrize("broken", BROKEN, ids=lambda row: str(row[0]))
def test_an_invalid_row_is_named(broken: Any, one: str, holes: Any) -> None:
    some = holes.filter(f"id < 20 or id = {broken[0]}")
    with pytest.raises(Exception, match=broken[3]) as caught:
        TFTransformer.from_run(one).transform(some).collect()
    assert re.search(r"row 20\b.*batch.*\b21", str(caught.value))
    assert "handle_invalid='skip'" in str(caught.value)


def test_settings_are_checked(one: str) -> None:
    with pytest.raises(InvalidInputError, match="handle_invalid.*error.*skip.*keep"):
        TFTransformer.from_run(one, handle_invalid="drop")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="prediction_col"):
        TFTransformer.from_run(one, prediction_col=5)  # type: ignore[arg-type]
    transformer = TFTransformer.from_run(one)
    with pytest.raises(InvalidInputError, match=r"predictBatchSize.*\b1\b.* 0"):
        transformer.setPredictBatchSize(0)


def test_types_that_would_be_cut_are_refused(one: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(one)
    with pytest.raises(DataError, match="'n'.*double.*int32"):
        transformer.transform(frame.withColumn("n", frame.n / 2))
    check(transformer.transform(frame.withColumn("n", frame.n.cast("bigint"))).collect())


def test_nested_arrays_whose_sizes_only_add_up(spark: Any, tmp_path: Path) -> None:
    import keras

    x = keras.Input((2, 2))
    model = keras.Model(x, keras.ops.sum(x, axis=2))
    model.compile("sgd", "mse")
    save_run(tmp_path, model, [Column("x", "float32", (2, 2))])
    rows = [
        (0, [[1.0, 2.0], [3.0, 4.0]]),
        (1, [[1.0], [2.0, 3.0, 4.0]]),
        (2, [[1.0, 2.0, 3.0, 4.0]]),
    ]
    frame = spark.createDataFrame(rows, "id int, x array<array<float>>")
    transformer = TFTransformer.from_run(str(tmp_path), handle_invalid="keep")
    found = {row.id: row.prediction for row in transformer.transform(frame).collect()}
    assert found == {0: [3.0, 7.0], 1: None, 2: None}


def test_outputs_of_all_types(spark: Any, tmp_path: Path) -> None:
    import keras

    x = keras.Input((2,))
    kinds = ["bool", "uint8", "uint16", "uint32", "int8", "int64", "float16", "bfloat16", "float64"]
    model = keras.Model(x, {kind: keras.ops.cast(x, kind) for kind in kinds})
    model.compile("sgd", "mse")
    save_run(tmp_path, model, [Column("x", "float32", (2,))])
    frame = spark.createDataFrame([([0.0, 200.0],)], "x array<float>")
    row = TFTransformer.from_run(str(tmp_path)).transform(frame).first()
    assert row.bool == [False, True]
    for kind in kinds[1:]:
        assert row[kind] == ([0, -56] if kind == "int8" else [0, 200])


def test_a_model_that_cannot_be_called_is_told_on_the_driver(frame: Any, tmp_path: Path) -> None:
    import keras

    class Silent(keras.Model):
        pass

    model = Silent()
    model.compile("sgd", "mse")
    save_run(tmp_path, model, COLUMNS)
    with pytest.raises(ModelError, match="NotImplementedError"):
        TFTransformer.from_run(str(tmp_path)).transform(frame)


def test_nothing_stays_in_the_temporary_directory(one: str, frame: Any) -> None:
    import tempfile

    place = Path(tempfile.gettempdir())
    transformer = TFTransformer.from_run(one)
    before = set(place.iterdir()) | set(map(Path, glob.glob("/tmp/*")))
    check(transformer.transform(frame.repartition(4)).collect())
    after = set(place.iterdir()) | set(map(Path, glob.glob("/tmp/*")))
    assert {p.name for p in after - before if "autograph" in p.name or p.suffix == ".py"} == set()


@pytest.mark.thorough
def test_a_transformer_outlives_its_session(one: str) -> None:
    script = Path(__file__).with_name("restarted_session.py")
    run = subprocess.run(
        [sys.executable, str(script), one], capture_output=True, text=True, timeout=400
    )
    expected = [*["predicted", "10.0"] * 2, *["stopped"] * 3]
    assert run.stdout.split() == expected, run.stderr[-2000:]


def test_model_fn_must_build_the_model_that_was_trained(frame: Any, tmp_path: Path) -> None:
    import keras

    def small(factor: float = 1.0, units: int = 2) -> Any:
        x = keras.Input((3,), name="x")
        outputs = keras.layers.Dense(units, kernel_initializer="ones")(x)
        model = keras.Model({"x": x}, keras.layers.Rescaling(factor)(outputs))
        model.compile("sgd", "mse")
        return model

    save_run(tmp_path, small(), COLUMNS[:1])
    place = str(tmp_path)
    right = TFTransformer.from_run(place, model_fn=small)
    assert [list(row.prediction) for row in right.transform(frame).collect()] == [[1.0, 1.0]] * 40
    with pytest.raises(ModelError, match="model.*weights"):
        TFTransformer.from_run(place, model_fn=lambda: small(3.0)).transform(frame)
    with pytest.raises(ModelError, match=r"model.*weight 0.*\(3, 4"):
        TFTransformer.from_run(place, model_fn=lambda: small(units=4)).transform(frame)


def test_only_dataframes_are_transformed(one: str) -> None:
    with pytest.raises(InvalidInputError, match="Spark DataFrame.*list"):
        TFTransformer.from_run(one).transform([1])


def test_a_call_may_be_given_later(frame: Any, tmp_path: Path) -> None:
    import keras

    def silent(called: bool) -> Any:
        class Pair(keras.Model):
            inputs = None

            def __init__(self) -> None:
                super().__init__()
                self.dense = keras.layers.Dense(2, kernel_initializer="ones")
                self.dense.build((None, 3))

        class Called(Pair):
            def call(self, inputs: Any) -> Any:
                return {"first": self.dense(inputs["x"]), "second": inputs["n"]}

        return Called() if called else Pair()

    model = silent(called=False)
    model.compile("sgd", "mse")
    save_run(tmp_path, model, COLUMNS, inputs=Binding(("x", "n"), ("x", "n")))
    with pytest.raises(ModelError, match="NotImplementedError"):
        TFTransformer.from_run(str(tmp_path)).transform(frame)
    with pytest.raises(ModelError, match="NotImplementedError"):
        TFTransformer.from_run(str(tmp_path), model_fn=lambda: silent(False)).transform(frame)
    given = TFTransformer.from_run(str(tmp_path), model_fn=lambda: silent(True))
    rows = given.transform(frame).collect()
    assert given.output_names == ["first", "second"]
    for row in rows:
        assert row.first == pytest.approx([1.0, 1.0])
        assert row.second == row.n
