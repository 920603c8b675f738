"""Wrong input is refused on the driver, before anything is launched, and leaves nothing behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import (
    CheckpointOptions,
    DataError,
    DataOptions,
    EnvironmentProblem,
    InvalidInputError,
    ModelError,
    NotEnoughSlotsError,
    RunDirectoryError,
    prepare_dataset,
)
from horovod_spark_runner.launch.driver.launcher import SparkLauncher, using_launcher

from ..trainings import train

pytestmark = pytest.mark.spark


class NoLaunch(SparkLauncher):
    def launch(self, *args: Any, **kwargs: Any) -> Any:
        pytest.fail("the run was launched")


@pytest.fixture(autouse=True)
def no_launch() -> Iterator[None]:
    with using_launcher(NoLaunch()):
        yield


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [(float(i), [float(i), 1.0], i % 2, str(i), {"k": 1.0}, i % 3 == 0) for i in range(20)]
    schema = "a double, v array<double>, y int, s string, m map<string,double>, held boolean"
    return spark.createDataFrame(rows, schema)


def model_fn() -> Any:
    pytest.fail("model_fn was called on the driver")


def attempt(frame: Any, folder: Path, **arguments: Any) -> Any:
    given: dict[str, Any] = {"feature_cols": ["a"], "label_cols": ["y"], "model_fn": model_fn}
    given.update(arguments)
    for name, options in (("data", DataOptions), ("checkpoints", CheckpointOptions)):
        own = {field.name for field in fields(options)} & given.keys()
        if own:
            given[name] = options(**{setting: given.pop(setting) for setting in own})
    return train(frame, given.pop("run_dir", folder / "run"), **given)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"feature_cols": ["nosuch"]}, DataError, "no column 'nosuch'; it has 'a', 'v', 'y'"),
        ({"feature_cols": ["a", "a"]}, DataError, "'a' more than once"),
        ({"feature_cols": ["m"]}, DataError, "'m' is of type map<string,double>"),
        ({"label_cols": ["s"]}, DataError, "'s' is of type string, .* label; .*StringIndexer"),
        ({"feature_cols": ["s"], "label_cols": ["s"]}, DataError, "'s' is of type string"),
        ({"sample_weight_col": "s"}, DataError, "'s' must hold one number per row"),
        (
            {"feature_cols": ["s"], "dtypes": {"s": "int32"}},
            DataError,
            "'s' the type 'int32', but it holds strings",
        ),
        (
            {"dtypes": {"a": "string"}},
            DataError,
            "'a' the type 'string'; it must be one of float32",
        ),
        ({"shapes": {"a": (None,)}}, DataError, "'a' the shape .None,.; it must consist of whole"),
        (
            {"transforms": {"a": "f"}},
            DataError,
            "transforms gives column 'a' 'f'; it must be a fun",
        ),
        ({"transforms": {"q": max}}, DataError, "transforms names 'q', which is neither"),
        ({"window_bytes": None}, InvalidInputError, "window_bytes must be a whole number"),
        ({"num_workers": 2.0}, InvalidInputError, "num_workers must be a whole number"),
        ({"run_dir": 3}, InvalidInputError, "run_dir must be the path or URL of a folder, got 3"),
        ({"run_dir": ""}, InvalidInputError, "run_dir is empty; give a folder"),
        ({"callbacks": 5}, InvalidInputError, "callbacks must be a list of .*got 5"),
        ({"custom_objects": [int]}, InvalidInputError, "custom_objects must be a dictionary"),
        ({"feature_cols": 1}, InvalidInputError, "feature_cols must be a column's name, a list"),
        ({"feature_cols": "nosuch"}, DataError, "no column 'nosuch'; it has 'a', 'v', 'y'"),
        ({"prediction_col": "v"}, DataError, "already has a column 'v', which a prediction is"),
        ({"prediction_col": {"x": "V"}}, DataError, "already has a column 'v'"),
        ({"feature_cols": [1]}, InvalidInputError, "feature_cols must hold column names"),
        ({"sample_weight_col": "v"}, DataError, "one number per row"),
        ({"shapes": {"q": (1,)}}, DataError, "shapes names 'q'"),
        ({"feature_cols": ["v"], "shapes": {"v": (3,)}}, DataError, "rows hold 2 elements"),
        ({"num_workers": 0}, InvalidInputError, "num_workers .* got 0"),
        ({"num_workers": -1}, InvalidInputError, "num_workers"),
        (
            {"num_workers": 5},
            NotEnoughSlotsError,
            r"asked for 5 slots with 1 core each, found 4: master local\[4\]",
        ),
        ({"gpus_per_worker": 1}, EnvironmentProblem, "schedules no GPUs"),
        ({"validation": 1.5}, DataError, "between 0 and 1"),
        ({"validation": "nosuch"}, DataError, "no such column"),
        ({"validation": "s"}, DataError, "must be boolean"),
        ({"validation": "a"}, DataError, "is a feature, label or weight too"),
        ({"validation": [1]}, DataError, "validation must be a fraction"),
        ({"resume": "yes"}, InvalidInputError, "resume must be one of auto, never, required"),
        ({"resume": "required"}, RunDirectoryError, "holds no checkpoint"),
        ({"materializer": "csv"}, InvalidInputError, "materializer must be one of"),
        ({"keep": 0}, InvalidInputError, "keep must be a whole number"),
        ({"model_fn": 3}, ModelError, "must be a function .* got 3"),
        ({"model_fn": "nosuch.keras"}, ModelError, "nosuch.keras does not exist"),
        ({"model_fn": lambda units: units}, ModelError, r"takes \(units\): missing a required"),
        ({"sample_weight_col": ["a"]}, InvalidInputError, r"a column's name, got \['a'\]"),
        ({"sample_weight_col": ""}, InvalidInputError, "a column's name, got ''"),
    ],
)
def test_refused(
    frame: Any, tmp_path: Path, arguments: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        attempt(frame, tmp_path, **arguments)
    assert not list(tmp_path.glob("run/data/*"))


def test_nulls_are_counted(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1.0, 0), (None, 1), (None, 1)], "a double, y int")
    message = r"column 'a' has 2 null values in 3 rows, first in row 1 \(a=None, y=1\)"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path)
    assert not list(tmp_path.glob("run/data/*"))


def test_null_vectors_and_labels_are_counted(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import IntegerType, StructField, StructType

    schema = StructType([StructField("v", VectorUDT()), StructField("y", IntegerType())])
    rows: list[tuple[Any, int | None]] = [(Vectors.dense([1.0]), 1), (None, 0)]
    with pytest.raises(DataError, match="column 'v' has 1 null values in 2 rows"):
        attempt(spark.createDataFrame(rows, schema), tmp_path, feature_cols=["v"])
    rows = [(Vectors.dense([1.0]), None), (Vectors.sparse(1, []), 0)]
    with pytest.raises(DataError, match="column 'y' has 1 null values in 2 rows"):
        attempt(spark.createDataFrame(rows, schema), tmp_path, feature_cols=["v"])


@pytest.mark.parametrize(
    ("schema", "rows", "message"),
    [
        (
            "v array<double>, y int",
            [([1.0, 2.0], 0), ([3.0, 4.0], 1), ([1.0], 2)],
            r"'v' holds arrays of 1 to 2 elements; row 0 has 2, row 2 \(y=2\) does not",
        ),
        (
            "v array<array<double>>, y int",
            [([[1.0], [2.0]], 0), ([[1.0], [2.0, 3.0]], 1)],
            r"'v' holds nested arrays of 1 to 2 elements; row 0 has 1, row 1 \(y=1\) does not",
        ),
        (
            "v array<array<double>>, y int",
            [([[1.0], [2.0, 3.0]], 0), ([[1.0], [2.0]], 1)],
            r"'v' holds nested arrays of 1 to 2 elements; in row 0 alone, of 1 to 2; all rows need",
        ),
        (
            "v array<array<array<int>>>, y int",
            [([[[1], [2]]], 0), ([[[1], [2]]], 1), ([[[1], [2, 3]]], 2)],
            r"'v' holds nested arrays of 1 to 2 elements; row 0 has 1, row 2 \(y=2\) does not",
        ),
        ("v string, y int", [("a", 0), (None, 1)], r"'v' has 1 null values in 2 rows.* row 1"),
        ("v string, y int", [(70_000 * "a", 0), (None, 1)], r"'v' has 1 null values in 2 rows"),
        (
            "v array<string>, y int",
            [(["a", "b"], 0), (["a", None], 1)],
            r"'v' has 1 arrays with null elements in 2 rows, first in row 1 \(y=1\)",
        ),
        (
            "v array<string>, y int",
            [(["a", "b"], 0), (["a"], 1)],
            r"'v' holds arrays of 1 to 2 elements; row 0 has 2, row 1 \(y=1\) does not",
        ),
        (
            "v array<double>, y int",
            [([1.0, 2.0], 0), ([3.0, None], 1)],
            r"'v' has 1 arrays with null elements in 2 rows, first in row 1 \(y=1\)",
        ),
        (
            "v array<array<int>>, y int",
            [([[1], [2]], 0), ([[1], None], 1)],
            r"'v' has 1 arrays with null elements in 2 rows, first in row 1",
        ),
        ("v array<int>, y int", [([], 0), ([], 1)], r"'v' has 2 empty arrays in 2 rows"),
        (
            "v double, y int",
            [(1.0, 0), (float("nan"), 1), (float("inf"), 1)],
            r"'v' has 2 values that are NaN or infinite in 3 rows, first in row 1 \(v=nan, y=1\)",
        ),
        (
            "v array<float>, y int",
            [([1.0, 2.0], 0), ([1.0, float("nan")], 1)],
            r"'v' has 1 values that are NaN or infinite in 2 rows, first in row 1",
        ),
        (
            "v double, y int",
            [(1.0, 0), (1e39, 1)],
            r"'v' has 1 values that are too large for float32 in 2 rows, first in row 1.*float64",
        ),
        (
            "v binary, y int",
            [(b"ab", 0), (b"abc", 1)],
            r"'v' holds byte strings of 2 to 3 bytes; row 0 has 2, row 1",
        ),
        ("v binary, y int", [(b"ab", 0), (None, 1)], r"'v' has 1 null values in 2 rows"),
    ],
)
def test_values_name_column_and_first_row(
    spark: Any, tmp_path: Path, schema: str, rows: list[Any], message: str
) -> None:
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, feature_cols=["v"])
    assert not list(tmp_path.glob("run/data/*"))


@pytest.mark.parametrize("kind", ["double", "int"])
def test_negative_sample_weights(spark: Any, tmp_path: Path, kind: str) -> None:
    frame = spark.range(9).selectExpr("id as y", "id / 2 as a", f"cast(2 - id as {kind}) as w")
    message = r"'w' has 6 negative sample weights in 9 rows, first in row 3 \(y=3, .*at least 0"
    with pytest.raises(DataError, match=message):
        attempt(frame.coalesce(1), tmp_path, sample_weight_col="w")
    with pytest.raises(DataError, match="validation rows .*'w' has .* negative sample weights"):
        attempt(frame.filter("y < 3"), tmp_path, sample_weight_col="w", validation=frame)
    folder = tmp_path / "files"
    frame.write.parquet(str(folder))
    with pytest.raises(DataError, match="'w' has negative sample weights, down to -6, in .*files"):
        attempt(folder, tmp_path, sample_weight_col="w")
    assert not list(tmp_path.glob("run/data/*"))


def test_columns_that_spark_does_not_tell_apart(spark: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    frame = spark.createDataFrame([(1.0, 2.0, 1)], ["a", "A", "y"])
    message = "the DataFrame has the columns 'a', 'A', which Spark does not tell apart"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path)
    one = frame.toDF("b", "a", "y")
    with pytest.raises(DataError, match=message):
        attempt(one, tmp_path, validation=frame)
    held = frame.selectExpr("y as a", "y", "true as h", "false as H")
    with pytest.raises(DataError, match="'h', 'H', which Spark does not tell apart"):
        attempt(held, tmp_path, validation="h")
    with pytest.raises(DataError, match="'h', 'H', which Spark does not tell apart"):
        attempt(held, tmp_path, validation=0.5, stratify="h")
    faulty = frame.selectExpr("if(y > 0, null, 1.0) as a", "y", "true as h", "false as H")
    with pytest.raises(DataError, match=r"'a' has 1 null values in 1 rows, first in row 0 \(y=1\)"):
        attempt(faulty, tmp_path)  # whose other columns cannot be shown
    pq.write_table(pa.table({"a": [1.0], "A": [1.0], "y": [1]}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match="f.parquet cannot be read: .*column `a` already exists"):
        attempt(str(tmp_path / "f.parquet"), tmp_path)


def test_what_is_no_data(spark: Any, tmp_path: Path) -> None:
    import pandas as pd

    with pytest.raises(DataError, match="must be a Spark DataFrame, .* type NoneType$"):
        attempt(None, tmp_path)
    frame = pd.DataFrame({"a": [1.0], "y": [1]})
    with pytest.raises(DataError, match="type pandas.*DataFrame; spark.createDataFrame makes"):
        attempt(frame, tmp_path)
    for data in (None, frame, [1]):
        with pytest.raises(DataError, match="must be a Spark DataFrame"):
            prepare_dataset(data, ["a"], data_dir=str(tmp_path))
    with pytest.raises(InvalidInputError, match="must be a path or URL, got ''"):
        attempt("", tmp_path)
    stream = spark.readStream.format("rate").load().selectExpr("1.0 as a", "1 as y")
    with pytest.raises(DataError, match="a streaming DataFrame cannot be trained on, as its rows"):
        attempt(stream, tmp_path)
    still = spark.createDataFrame(frame)
    with pytest.raises(DataError, match="a streaming DataFrame cannot be validated with"):
        attempt(still, tmp_path, validation=stream)
    with pytest.raises(DataError, match="a streaming DataFrame cannot be trained on"):
        prepare_dataset(stream, ["a"], data_dir=str(tmp_path))


@pytest.mark.parametrize("columns", ["a", None, ["a", 1], 3])
def test_what_are_no_columns(frame: Any, tmp_path: Path, columns: Any) -> None:
    with pytest.raises(InvalidInputError, match="columns must be a list of column names, got"):
        prepare_dataset(frame, columns, data_dir=str(tmp_path))


def test_a_data_dir_that_cannot_be_written(frame: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        message = "the rows cannot be written to .*file.*data_dir must be a folder"
        with pytest.raises(InvalidInputError, match=message):
            attempt(frame, tmp_path, data_dir=str(place))
        with pytest.raises(InvalidInputError, match=message):
            prepare_dataset(frame, ["a"], data_dir=str(place))


def test_validation_rows_of_another_type(spark: Any, frame: Any, tmp_path: Path) -> None:
    held = spark.createDataFrame([(1.0, 0.5)], "a double, y double")
    message = "the validation rows have column 'y': float32, the training rows 'y': int32"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, validation=held)
    held = spark.createDataFrame([("b", 1)], "a string, y int")
    with pytest.raises(DataError, match="the validation rows have column 'a': string"):
        attempt(frame, tmp_path, validation=held)


def test_labels_that_do_not_fit_the_type_asked_for(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1.0, 1), (2.0, 5_000_000_000)], "a double, y long")
    with pytest.raises(DataError, match=r"'y' has 1 values that are too large for int32.*int64"):
        attempt(frame, tmp_path, dtypes={"y": "int32"})
    with pytest.raises(DataError, match="'a' the type int32, but it holds real numbers"):
        attempt(frame, tmp_path, dtypes={"a": "int32"})
    with pytest.raises(DataError, match="'y' the type 'complex'; it must be one of int8"):
        attempt(frame, tmp_path, dtypes={"y": "complex"})
    with pytest.raises(DataError, match="dtypes names 'q'"):
        attempt(frame, tmp_path, dtypes={"q": "int32"})


def test_overflow_in_vectors(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([1.0, 2.0]), 0), (Vectors.sparse(2, {1: -1e300}), 1)]
    frame = spark.createDataFrame(rows, ["v", "y"]).coalesce(1)
    with pytest.raises(DataError, match=r"'v' has 1 values that are too large.*first in row 1"):
        attempt(frame, tmp_path, feature_cols=["v"])


def test_images_among_other_bytes(spark: Any, tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + b"0" * 20
    frame = spark.createDataFrame([(png, 0), (png, 1), (b"no", 2)], "v binary, y int").coalesce(1)
    with pytest.raises(DataError, match=r"1 values that are no PNG.*as 2 rows are,.* row 2 \(y=2"):
        attempt(frame, tmp_path, feature_cols=["v"], shapes={"v": (8, 8, 3)})


def test_parquet_paths(spark: Any, frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nosuch holds no Parquet files"):
        attempt(str(tmp_path / "nosuch"), tmp_path)
    with pytest.raises(DataError, match="must be a Spark DataFrame, or the path .* type list$"):
        attempt([1, 2], tmp_path)
    folder = str(tmp_path / "files")
    spark.createDataFrame([(1.0, 1), (None, 2)], "a double, y int").write.parquet(folder)
    with pytest.raises(DataError, match=r"column 'a' has 1 null values in .*files"):
        attempt(folder, tmp_path)
    with pytest.raises(DataError, match=r"no column 'b'; it has 'a', 'y'"):
        attempt(folder, tmp_path, feature_cols=["b"])
    (tmp_path / "text").mkdir()
    file = tmp_path / "text" / "f.parquet"
    file.write_text("a,y\n1,2\n")
    for place in (file, file.parent):
        with pytest.raises(DataError, match="f.parquet is no Parquet file, or a damaged one"):
            attempt(place, tmp_path)


def test_storage_that_spark_does_not_know(spark: Any, frame: Any, tmp_path: Path) -> None:
    message = "Spark cannot reach nosuch://x/y: .*No FileSystem for scheme"
    with pytest.raises(EnvironmentProblem, match=message):
        attempt(frame, tmp_path, data_dir="nosuch://x/y")
    with pytest.raises(EnvironmentProblem, match=message):
        attempt("nosuch://x/y", tmp_path)


def test_stratify_needs_a_fraction_and_a_column(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stratify needs a fraction"):
        attempt(frame, tmp_path, stratify="y")
    with pytest.raises(DataError, match="stratify='q': the DataFrame has no such column"):
        attempt(frame, tmp_path, stratify="q", validation=0.5)


def test_empty(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no rows"):
        attempt(frame.filter("a < 0"), tmp_path)
    assert not list(tmp_path.glob("run/data/*"))


def test_fewer_rows_than_ranks(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="have 2 rows, fewer than the 3 ranks"):
        attempt(frame.filter("a < 2"), tmp_path, num_workers=3)
    assert not list(tmp_path.glob("run/data/*"))


def test_a_validation_part_without_rows_is_named(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"validation rows \(validation='held'\)"):
        attempt(frame.filter("not held"), tmp_path, validation="held")


def test_a_split_that_leaves_no_rows_to_one_side(frame: Any, tmp_path: Path) -> None:
    message = r"validation rows \(validation=0.001\): there are no rows to validate with; give"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, validation=0.001)
    with pytest.raises(DataError, match="train rows .*no rows to train on; give a small"):
        attempt(frame.filter("a < 1"), tmp_path, validation=0.9999999)


@pytest.mark.parametrize(
    ("kinds", "found"), [((0, 1, 2), 2), ((0, 1, -1), -1), ((0, 1, 2**32), 2**32)]
)
def test_a_validation_column_of_numbers_holds_0_and_1(
    spark: Any, tmp_path: Path, kinds: tuple[int, ...], found: int
) -> None:
    """Such as the numbers of folds, or of training, validation and test rows."""
    rows = [(float(kind), kind % 2, kind) for kind in kinds]
    frame = spark.createDataFrame(rows, "a double, y int, part long")
    message = f"'part' holds {found}; it must be true or 1 .*df\\['part'\\] == {found}"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, validation="part")


def test_null_in_the_validation_column_is_no_silent_loss(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1.0, 0, True), (2.0, 1, None)], "a double, y int, h boolean")
    with pytest.raises(DataError, match="'h' has 1 null values"):
        attempt(frame, tmp_path, validation="h")


def test_several_columns_of_one_name(frame: Any, tmp_path: Path) -> None:
    both = frame.select("a", "a", "y")
    with pytest.raises(DataError, match="several columns named 'a'"):
        attempt(both, tmp_path)


def test_what_cannot_be_pickled_is_named(frame: Any, tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidInputError, match="model_fn cannot be sent.*variable 'lock'"):
        attempt(frame, tmp_path, model_fn=lambda: lock)
    with pytest.raises(InvalidInputError, match="callbacks cannot be sent.*lock"):
        attempt(frame, tmp_path, callbacks=[lock])
    with pytest.raises(InvalidInputError, match=r"variable 'frame' captured .*\(a pyspark\."):
        attempt(frame, tmp_path, model_fn=lambda: frame.count())


def test_run_dir_that_cannot_be_written(frame: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is not writable"):
        attempt(frame, tmp_path, run_dir=str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.keras", b"no archive", "is not a Keras archive"),
        ("m.json", b"{", "is not JSON"),
        ("m.json", b"{}", "was not made by model.to_json"),
        ("m.json", json.dumps({"class_name": "S", "config": {}}).encode(), "was not compiled"),
        ("m.h5", b"", "must end in .keras or .json"),
    ],
)
def test_bad_model_files(
    frame: Any, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        attempt(frame, tmp_path, model_fn=str(tmp_path / name))


def test_columns_that_are_no_names_of_the_model(frame: Any, tmp_path: Path) -> None:
    """The model is built in one of Spark's Python workers."""

    def two_inputs() -> Any:
        import keras

        inputs = {name: keras.Input((1,), name=name) for name in ("a", "b")}
        model = keras.Model(inputs, keras.layers.Add(name="y")(list(inputs.values())))
        model.compile("sgd", "mse")
        return model

    def broken() -> Any:
        raise KeyError("nosuch")

    with pytest.raises(DataError, match="inputs 'a', 'b', 'b' is no column: .* 'a', 'v', 'y'"):
        attempt(frame, tmp_path, model_fn=two_inputs, feature_cols=None)
    with pytest.raises(ModelError, match=r"could not be built:\n(?s:.*)KeyError: 'nosuch'"):
        attempt(frame, tmp_path, model_fn=broken, feature_cols=None)
    assert not (tmp_path / "run" / "data").exists()


def test_model_files_that_are_folders_or_urls(frame: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    with pytest.raises(ModelError, match="saved' is a folder; give a function"):
        attempt(frame, tmp_path, model_fn=tmp_path / "saved")
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(ModelError, match="is a SavedModel, .*initial_weights"):
        attempt(frame, tmp_path, model_fn=str(tmp_path / "saved"))
    (tmp_path / "a b.json").write_text("{}")
    with pytest.raises(ModelError, match=r"a b\.json was not made by model.to_json"):
        attempt(frame, tmp_path, model_fn=f"file://{tmp_path}/a%20b.json")
