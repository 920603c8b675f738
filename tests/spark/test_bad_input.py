"""Wrong input is refused on the driver, before anything is launched, and leaves nothing behind."""

from __future__ import annotations

import json
import re
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
    HorovodEstimator,
    InvalidInputError,
    ModelError,
    NotEnoughSlotsError,
    RunDirectoryError,
    plan_training,
    prepare_dataset,
)
from horovod_spark_runner.cluster.driver import launch
from horovod_spark_runner.cluster.driver.launch import _SparkLauncher, using_launcher
from horovod_spark_runner.cluster.spark.capacity import check_slots
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.config.launch import LaunchSettings
from horovod_spark_runner.data.prepare.datasets import check_data
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.tune import choice, tune

from ..trainings import train

pytestmark = pytest.mark.spark


class NoLaunch(_SparkLauncher):
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
    settings: dict[str, Any] = {"feature_cols": ["a"], "label_cols": ["y"], "model_fn": model_fn}
    settings.update(arguments)
    for name, options in (("data", DataOptions), ("checkpoints", CheckpointOptions)):
        chosen = {field.name for field in fields(options)} & settings.keys()
        if chosen:
            settings[name] = options(**{setting: settings.pop(setting) for setting in chosen})
    return train(frame, settings.pop("run_dir", folder / "run"), **settings)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"feature_cols": ["nosuch"]}, DataError, "'nosuch'.*'a'.*'v'.*'y'"),
        ({"feature_cols": ["a", "a"]}, DataError, "'a'"),
        ({"feature_cols": ["m"]}, DataError, "'m'.*map<string,double>"),
        ({"label_cols": ["s"]}, DataError, "'s'.*string.*label.*StringIndexer"),
        ({"feature_cols": ["s"], "label_cols": ["s"]}, DataError, "'s'.*string"),
        ({"sample_weight_col": "s"}, DataError, "'s'.*(number|numeric)"),
        (
            {"feature_cols": ["s"], "dtypes": {"s": "int32"}},
            DataError,
            "'s'.*'int32'.*string",
        ),
        (
            {"dtypes": {"a": "string"}},
            DataError,
            "'a'.*'string'.*float32",
        ),
        ({"shapes": {"a": (None,)}}, DataError, "'a'.*.None,."),
        (
            {"transforms": {"a": "f"}},
            DataError,
            "transforms.*'a'.*'f'",
        ),
        ({"transforms": {"q": max}}, DataError, "transforms.*'q'"),
        ({"window_bytes": None}, InvalidInputError, "window_bytes"),
        ({"num_workers": 2.0}, InvalidInputError, "num_workers"),
        ({"run_dir": 3}, InvalidInputError, "run_dir.* 3"),
        ({"run_dir": ""}, InvalidInputError, "run_dir"),
        ({"callbacks": 5}, InvalidInputError, "callbacks.* 5"),
        ({"callbacks": lambda model: []}, InvalidInputError, r"callbacks.*\(model\)"),
        ({"custom_objects": [int]}, InvalidInputError, "custom_objects"),
        ({"feature_cols": 1}, InvalidInputError, "feature_cols"),
        ({"feature_cols": "nosuch"}, DataError, "'nosuch'.*'a'.*'v'.*'y'"),
        ({"prediction_col": "v"}, DataError, "'v'.*predict"),
        ({"prediction_col": {"x": "V"}}, DataError, "'v'"),
        ({"feature_cols": [1]}, InvalidInputError, "feature_cols"),
        ({"shapes": {"q": (1,)}}, DataError, "shapes.*'q'"),
        ({"feature_cols": ["v"], "shapes": {"v": (3,)}}, DataError, r"\b2\b.*element"),
        ({"num_workers": 0}, InvalidInputError, "num_workers.* 0"),
        ({"num_workers": -1}, InvalidInputError, "num_workers"),
        (
            {"num_workers": 5},
            NotEnoughSlotsError,
            r"\b5 slots.*\b1 core.*\b4\b.*local\[4\]",
        ),
        ({"gpus_per_worker": 1}, EnvironmentProblem, "GPU"),
        ({"validation": 1.5}, DataError, r"\b0\b.*\b1"),
        ({"validation": "nosuch"}, DataError, "column"),
        ({"validation": "s"}, DataError, "boolean"),
        ({"validation": "a"}, DataError, "feature.*label.*weight"),
        ({"validation": [1]}, DataError, "validation.*fraction"),
        ({"resume": "yes"}, InvalidInputError, "resume.*auto.*never.*required"),
        ({"resume": "required"}, RunDirectoryError, "checkpoint"),
        ({"materializer": "csv"}, InvalidInputError, "materializer"),
        ({"keep": 0}, InvalidInputError, "keep"),
        ({"model_fn": 3}, ModelError, "function.* 3"),
        ({"model_fn": "nosuch.keras"}, ModelError, "nosuch.keras"),
        ({"model_fn": lambda units: units}, ModelError, r"\(units\).*missing a required"),
        ({"sample_weight_col": ["a"]}, InvalidInputError, r"column.*\['a'\]"),
        ({"sample_weight_col": ""}, InvalidInputError, "column.*''"),
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
    message = r"'a'.*null.*\b2 of 3\b.*row 1\b.*a=None, y=1"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path)
    assert not list(tmp_path.glob("run/data/*"))


@pytest.mark.thorough
def test_null_vectors_and_labels_are_counted(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import IntegerType, StructField, StructType

    schema = StructType([StructField("v", VectorUDT()), StructField("y", IntegerType())])
    rows: list[tuple[Any, int | None]] = [(Vectors.dense([1.0]), 1), (None, 0)]
    with pytest.raises(DataError, match=r"'v'.*null.*\b1 of 2\b"):
        attempt(spark.createDataFrame(rows, schema), tmp_path, feature_cols=["v"])
    rows = [(Vectors.dense([1.0]), None), (Vectors.sparse(1, []), 0)]
    with pytest.raises(DataError, match=r"'y'.*null.*\b1 of 2\b"):
        attempt(spark.createDataFrame(rows, schema), tmp_path, feature_cols=["v"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schema", "rows", "message"),
    [
        (
            "v array<double>, y int",
            [([1.0, 2.0], 0), ([3.0, 4.0], 1), ([1.0], 2)],
            r"'v'.*array.*\b1\b.*\b2\b.*row 0\b.*\b2\b.*row 2\b.*y=2",
        ),
        (
            "v array<array<double>>, y int",
            [([[1.0], [2.0]], 0), ([[1.0], [2.0, 3.0]], 1)],
            r"'v'.*nested array.*\b1\b.*\b2\b.*row 0\b.*\b1\b.*row 1\b.*y=1",
        ),
        (
            "v array<array<double>>, y int",
            [([[1.0], [2.0, 3.0]], 0), ([[1.0], [2.0]], 1)],
            r"'v'.*nested array.*\b1\b.*\b2\b.*row 0\b.*\b1 \w+ 2\b",
        ),
        (
            "v array<array<array<int>>>, y int",
            [([[[1], [2]]], 0), ([[[1], [2]]], 1), ([[[1], [2, 3]]], 2)],
            r"'v'.*nested array.*\b1\b.*\b2\b.*row 0\b.*\b1\b.*row 2\b.*y=2",
        ),
        ("v string, y int", [("a", 0), (None, 1)], r"'v'.*null.*\b1 of 2\b.* row 1"),
        ("v string, y int", [(70_000 * "a", 0), (None, 1)], r"'v'.*null.*\b1 of 2\b"),
        (
            "v array<string>, y int",
            [(["a", "b"], 0), (["a", None], 1)],
            r"'v'.*array.*null.*\b1 of 2\b.*row 1\b.*y=1",
        ),
        (
            "v array<string>, y int",
            [(["a", "b"], 0), (["a"], 1)],
            r"'v'.*array.*\b1\b.*\b2\b.*row 0\b.*\b2\b.*row 1\b.*y=1",
        ),
        (
            "v array<double>, y int",
            [([1.0, 2.0], 0), ([3.0, None], 1)],
            r"'v'.*array.*null.*\b1 of 2\b.*row 1\b.*y=1",
        ),
        (
            "v array<array<int>>, y int",
            [([[1], [2]], 0), ([[1], None], 1)],
            r"'v'.*array.*null.*\b1 of 2\b.*row 1",
        ),
        ("v array<int>, y int", [([], 0), ([], 1)], r"'v'.*empty array.*\b2 of 2\b"),
        (
            "v double, y int",
            [(1.0, 0), (float("nan"), 1), (float("inf"), 1)],
            r"'v'.*NaN.*inf.*\b2 of 3\b.*row 1\b.*v=nan, y=1",
        ),
        (
            "v array<float>, y int",
            [([1.0, 2.0], 0), ([1.0, float("nan")], 1)],
            r"'v'.*NaN.*inf.*\b1 of 2\b.*row 1",
        ),
        (
            "v double, y int",
            [(1.0, 0), (1e39, 1)],
            r"'v'.*float32.*\b1 of 2\b.*row 1.*float64",
        ),
        (
            "v binary, y int",
            [(b"ab", 0), (b"abc", 1)],
            r"'v'.*\b2\b.*\b3 bytes.*row 0\b.*\b2\b.*row 1",
        ),
        ("v binary, y int", [(b"ab", 0), (None, 1)], r"'v'.*null.*\b1 of 2\b"),
    ],
)
def test_values_name_column_and_first_row(
    spark: Any, tmp_path: Path, schema: str, rows: list[Any], message: str
) -> None:
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, feature_cols=["v"])
    assert not list(tmp_path.glob("run/data/*"))


def test_a_run_whose_rows_were_refused_is_listed_as_any_other(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = spark.createDataFrame([(1.0, 0), (float("nan"), 1)], "a double, y int")
    with pytest.raises(DataError, match="NaN") as refused:
        attempt(frame, tmp_path)
    run = tmp_path / "run"
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert re.search(r"^run +not finished", capsys.readouterr().out, re.M)
    assert main(["runs", "show", str(run)]) == 0
    assert re.search(r"state +not finished", capsys.readouterr().out)
    (call,) = map(json.loads, (run / "calls.jsonl").read_text().splitlines())
    assert call["error"] == str(refused.value).partition("\n")[0]
    assert list(call["seconds"]) == ["prepare", "materialize"]


def without_labels() -> Any:
    import torch

    from horovod_spark_runner import TorchModel

    return TorchModel(torch.nn.Linear(1, 1), "MSELoss", "SGD")


def test_missing_labels_are_told_before_rows_are_written(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"label_cols.*loss compares.*autoencoder; \[\] for none"):
        attempt(frame, tmp_path, label_cols=None, model_fn=without_labels)
    assert not list(tmp_path.glob("run/data/*"))


def test_little_shared_memory_is_warned_of_while_rows_are_prepared(
    spark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = b"/dev/shm has 16 MiB left (host a)"
    monkeypatch.setattr(launch, "collect_from_tasks", lambda *_, **__: [lacking, lacking])
    allotment = check_slots(spark, LaunchSettings(), 2)
    _SparkLauncher().warm_up(spark, LaunchSettings(), allotment, [])
    for thread in threading.enumerate():
        if thread.name == "hsr-warm-up":
            thread.join(60)
    (warning,) = [one.getMessage() for one in caplog.records]
    assert re.search(r"MPI may not start: /dev/shm has 16 MiB left \(host a\); .*shm-size", warning)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["double", "int"])
def test_negative_sample_weights(spark: Any, tmp_path: Path, kind: str) -> None:
    frame = spark.range(9).selectExpr("id as y", "id / 2 as a", f"cast(2 - id as {kind}) as w")
    message = r"'w'.*negative.*weight.*\b6 of 9\b.*row 3\b.*y=3, .* 0"
    with pytest.raises(DataError, match=message):
        attempt(frame.coalesce(1), tmp_path, sample_weight_col="w")
    with pytest.raises(DataError, match="validation.*'w'.*negative.*weight"):
        attempt(frame.filter("y < 3"), tmp_path, sample_weight_col="w", validation=frame)
    folder = tmp_path / "files"
    frame.write.parquet(str(folder))
    with pytest.raises(DataError, match="'w'.*negative.*weight.*-6.*files"):
        attempt(folder, tmp_path, sample_weight_col="w")
    of_steps = frame.selectExpr("y", "a", "array(1, w) as w")
    with pytest.raises(DataError, match=r"'w'.*negative.*weight.*\b6 of 9\b"):
        attempt(of_steps.coalesce(1), tmp_path, sample_weight_col="w")
    assert not list(tmp_path.glob("run/data/*"))


@pytest.mark.thorough
def test_columns_that_spark_does_not_tell_apart(spark: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    frame = spark.createDataFrame([(1.0, 2.0, 1)], ["a", "A", "y"])
    message = "'a'.*'A'"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path)
    one = frame.toDF("b", "a", "y")
    with pytest.raises(DataError, match=message):
        attempt(one, tmp_path, validation=frame)
    held = frame.selectExpr("y as a", "y", "true as h", "false as H")
    with pytest.raises(DataError, match="'h'.*'H'"):
        attempt(held, tmp_path, validation="h")
    with pytest.raises(DataError, match="'h'.*'H'"):
        attempt(held, tmp_path, validation=0.5, stratify="h")
    faulty = frame.selectExpr("if(y > 0, null, 1.0) as a", "y", "true as h", "false as H")
    with pytest.raises(DataError, match=r"'a'.*null.*\b1 of 1\b.*row 0\b.*y=1"):
        attempt(faulty, tmp_path)  # whose other columns cannot be shown
    pq.write_table(pa.table({"a": [1.0], "A": [1.0], "y": [1]}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match="f.parquet.*column `a` already exists"):
        attempt(str(tmp_path / "f.parquet"), tmp_path)


def test_what_is_no_data(spark: Any, tmp_path: Path) -> None:
    import pandas as pd

    with pytest.raises(DataError, match="Spark DataFrame.* NoneType"):
        attempt(None, tmp_path)
    frame = pd.DataFrame({"a": [1.0], "y": [1]})
    with pytest.raises(DataError, match="pandas.*DataFrame.*spark.createDataFrame"):
        attempt(frame, tmp_path)
    for data in (None, frame, [1]):
        with pytest.raises(DataError, match="Spark DataFrame"):
            prepare_dataset(data, ["a"], data_dir=str(tmp_path))
    with pytest.raises(InvalidInputError, match="path.*''"):
        attempt("", tmp_path)
    stream = spark.readStream.format("rate").load().selectExpr("1.0 as a", "1 as y")
    with pytest.raises(DataError, match="streaming.*train"):
        attempt(stream, tmp_path)
    still = spark.createDataFrame(frame)
    with pytest.raises(DataError, match="streaming.*validat"):
        attempt(still, tmp_path, validation=stream)
    with pytest.raises(DataError, match="streaming.*train"):
        prepare_dataset(stream, ["a"], data_dir=str(tmp_path))


@pytest.mark.parametrize("kind", ["pandas", "pandas on Spark", "RDD"])
def test_what_is_taken_for_a_dataframe(spark: Any, tmp_path: Path, kind: str) -> None:
    import pandas as pd

    columns = {"a": [1.0], "y": [1]}
    if kind == "pandas":
        data, advice = pd.DataFrame(columns), r"spark\.createDataFrame"
    elif kind == "RDD":
        data, advice = spark.sparkContext.parallelize([(1.0, 1)]), r"\.toDF"
    else:
        import pyspark.pandas as ps

        data, advice = ps.DataFrame(columns), r"\.to_spark\(\)"
    place, space = str(tmp_path / "place"), {"a": choice(1, 2)}
    estimator = HorovodEstimator(modelFn=model_fn)
    for call in (
        lambda: attempt(data, tmp_path),
        lambda: attempt(data, tmp_path, feature_cols=None),
        lambda: estimator.fit(data),
        lambda: estimator.fit(data, [{estimator.epochs: 1}]),
        lambda: plan_training(data, model_fn),
        lambda: plan_training(data, model_fn, plan_dir=place),
        lambda: tune(data, lambda params: None, space, metric="loss", study_dir=place),
    ):
        with pytest.raises(DataError, match=f"Spark DataFrame.*{advice}"):
            call()
    validation = spark.createDataFrame([(1.0, 1)], ["a", "y"])
    with pytest.raises(DataError, match=f"validation.*{advice}"):
        attempt(validation, tmp_path, validation=data)


@pytest.mark.parametrize("columns", ["a", None, ["a", 1], 3])
def test_what_are_no_columns(frame: Any, tmp_path: Path, columns: Any) -> None:
    with pytest.raises(InvalidInputError, match="columns"):
        prepare_dataset(frame, columns, data_dir=str(tmp_path))


def test_a_data_dir_that_cannot_be_written(frame: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        message = "file.*data_dir"
        with pytest.raises(InvalidInputError, match=message):
            attempt(frame, tmp_path, data_dir=str(place))
        with pytest.raises(InvalidInputError, match=message):
            prepare_dataset(frame, ["a"], data_dir=str(place))


def test_validation_rows_of_another_type(spark: Any, frame: Any, tmp_path: Path) -> None:
    held = spark.createDataFrame([(1.0, 0.5)], "a double, y double")
    message = "validation.*'y'.*float32.*train.*'y'.*int32"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, validation=held)
    held = spark.createDataFrame([("b", 1)], "a string, y int")
    with pytest.raises(DataError, match="validation.*'a'.*string"):
        attempt(frame, tmp_path, validation=held)


def test_labels_that_do_not_fit_the_type_asked_for(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1.0, 1), (2.0, 5_000_000_000)], "a double, y long")
    with pytest.raises(DataError, match=r"'y'.*int32.*\b1 of 2\b.*int64"):
        attempt(frame, tmp_path, dtypes={"y": "int32"})
    with pytest.raises(DataError, match="'a'.*int32"):
        attempt(frame, tmp_path, dtypes={"a": "int32"})
    with pytest.raises(DataError, match="'y'.*'complex'.*int8"):
        attempt(frame, tmp_path, dtypes={"y": "complex"})
    with pytest.raises(DataError, match="dtypes.*'q'"):
        attempt(frame, tmp_path, dtypes={"q": "int32"})


@pytest.mark.thorough
def test_overflow_in_vectors(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([1.0, 2.0]), 0), (Vectors.sparse(2, {1: -1e300}), 1)]
    frame = spark.createDataFrame(rows, ["v", "y"]).coalesce(1)
    with pytest.raises(DataError, match=r"'v'.*(large|overflow).*\b1 of 2\b.*row 1"):
        attempt(frame, tmp_path, feature_cols=["v"])


def test_images_among_other_bytes(spark: Any, tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + b"0" * 20
    frame = spark.createDataFrame([(png, 0), (png, 1), (b"no", 2)], "v binary, y int").coalesce(1)
    with pytest.raises(DataError, match=r"PNG.*\b2\b.*\b1 of 3\b.* row 2\b.*y=2"):
        attempt(frame, tmp_path, feature_cols=["v"], shapes={"v": (8, 8, 3)})


def test_parquet_paths(spark: Any, frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nosuch.*Parquet"):
        attempt(str(tmp_path / "nosuch"), tmp_path)
    with pytest.raises(DataError, match="Spark DataFrame.*path.* list"):
        attempt([1, 2], tmp_path)
    folder = str(tmp_path / "files")
    spark.createDataFrame([(1.0, 1), (None, 2)], "a double, y int").write.parquet(folder)
    with pytest.raises(DataError, match=r"'a'.*\b1 null.*files"):
        attempt(folder, tmp_path)
    with pytest.raises(DataError, match="'b'.*'a'.*'y'"):
        attempt(folder, tmp_path, feature_cols=["b"])
    (tmp_path / "text").mkdir()
    file = tmp_path / "text" / "f.parquet"
    file.write_text("a,y\n1,2\n")
    for place in (file, file.parent):
        with pytest.raises(DataError, match="f.parquet .*Parquet"):
            attempt(place, tmp_path)


def test_storage_that_spark_does_not_know(spark: Any, frame: Any, tmp_path: Path) -> None:
    message = "nosuch://x/y.*No FileSystem for scheme"
    with pytest.raises(EnvironmentProblem, match=message):
        attempt(frame, tmp_path, data_dir="nosuch://x/y")
    with pytest.raises(EnvironmentProblem, match=message):
        attempt("nosuch://x/y", tmp_path)


def test_stratify_needs_a_fraction_and_a_column(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stratify.*fraction"):
        attempt(frame, tmp_path, stratify="y")
    with pytest.raises(DataError, match="stratify='q'"):
        attempt(frame, tmp_path, stratify="q", validation=0.5)


def test_empty(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        attempt(frame.filter("a < 0"), tmp_path)
    assert not list(tmp_path.glob("run/data/*"))


def test_fewer_rows_than_ranks(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\b2 rows.*\b3\b"):
        attempt(frame.filter("a < 2"), tmp_path, num_workers=3)
    assert not list(tmp_path.glob("run/data/*"))


def test_a_validation_part_without_rows_is_named(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="validation='held'"):
        attempt(frame.filter("not held"), tmp_path, validation="held")


@pytest.mark.thorough
def test_a_split_that_leaves_no_rows_to_one_side(frame: Any, tmp_path: Path) -> None:
    message = "validation=0.001.*no rows"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, validation=0.001)
    with pytest.raises(DataError, match="train.*no rows"):
        attempt(frame.filter("a < 1"), tmp_path, validation=0.9999999)


@pytest.mark.parametrize(
    ("kinds", "value"), [((0, 1, 2), 2), ((0, 1, -1), -1), ((0, 1, 2**32), 2**32)]
)
def test_a_validation_column_of_numbers_holds_0_and_1(
    spark: Any, tmp_path: Path, kinds: tuple[int, ...], value: int
) -> None:
    """Such as the numbers of folds, or of training, validation and test rows."""
    rows = [(float(kind), kind % 2, kind) for kind in kinds]
    frame = spark.createDataFrame(rows, "a double, y int, part long")
    message = f"'part'.* {value}.*df\\['part'\\] == {value}"
    with pytest.raises(DataError, match=message):
        attempt(frame, tmp_path, validation="part")


def test_null_in_the_validation_column_is_no_silent_loss(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1.0, 0, True), (2.0, 1, None)], "a double, y int, h boolean")
    with pytest.raises(DataError, match="'h'.* 1 null"):
        attempt(frame, tmp_path, validation="h")


def test_several_columns_of_one_name(frame: Any, tmp_path: Path) -> None:
    both = frame.select("a", "a", "y")
    with pytest.raises(DataError, match="column.*'a'"):
        attempt(both, tmp_path)


def test_what_cannot_be_pickled_is_named(frame: Any, tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidInputError, match="model_fn.*'lock'"):
        attempt(frame, tmp_path, model_fn=lambda: lock)
    with pytest.raises(InvalidInputError, match="callbacks.*lock"):
        attempt(frame, tmp_path, callbacks=[lock])
    with pytest.raises(InvalidInputError, match=r"'frame'.*pyspark\."):
        attempt(frame, tmp_path, model_fn=lambda: frame.count())


def test_run_dir_that_cannot_be_written(frame: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="writ"):
        attempt(frame, tmp_path, run_dir=str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.keras", b"no archive", "Keras"),
        ("m.json", b"{", "JSON"),
        ("m.json", b"{}", "by model.to_json"),
        ("m.json", json.dumps({"class_name": "S", "config": {}}).encode(), "compile"),
        ("m.h5", b"", ".keras.*.json"),
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

    with pytest.raises(DataError, match="'a', 'b'.*'b'.*'a', 'v', 'y'"):
        attempt(frame, tmp_path, model_fn=two_inputs, feature_cols=None)
    with pytest.raises(ModelError, match="KeyError: 'nosuch'"):
        attempt(frame, tmp_path, model_fn=broken, feature_cols=None)
    assert not (tmp_path / "run" / "data").exists()


def test_model_files_that_are_folders_or_urls(frame: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    with pytest.raises(ModelError, match="saved'.*(folder|directory)"):
        attempt(frame, tmp_path, model_fn=tmp_path / "saved")
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(ModelError, match="SavedModel.*initial_weights"):
        attempt(frame, tmp_path, model_fn=str(tmp_path / "saved"))
    (tmp_path / "a b.json").write_text("{}")
    with pytest.raises(ModelError, match=r"a b\.json.*by model.to_json"):
        attempt(frame, tmp_path, model_fn=f"file://{tmp_path}/a%20b.json")


def test_images_without_a_shape_are_refused_before_rows_are_written(
    spark: Any, tmp_path: Path
) -> None:
    png = b"\x89PNG\r\n\x1a\n" + b"0" * 20
    frame = spark.createDataFrame([(png, 0), (png, 1)], "v binary, y int")
    pattern = r"'v'.*image.*data=DataOptions\(shapes=\{'v': \(height"
    with pytest.raises(DataError, match=pattern):
        attempt(frame, tmp_path, feature_cols=["v"])
    assert not list(tmp_path.rglob("*.parquet"))
    # Other bytes need none.
    other = spark.createDataFrame([(b"1234", 0)], "v binary, y int")
    check_data(other, Roles(("v",), ("y",)), DataOptions())
