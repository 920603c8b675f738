"""Runs and data on HDFS: one of the tests' own, or that of the name node in ``HSR_TEST_HDFS``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    Dataset,
    HorovodEstimator,
    RunDirectoryError,
    TFTransformer,
    prepare_dataset,
)
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.rundir.directory import RunDirectory
from horovod_spark_runner.storage.filesystem import Location
from tests.faults.injection import Fault
from tests.faults.training import make_frame, train
from tests.hdfs_server import hdfs_server
from tests.runs import save_run

pytestmark = pytest.mark.thorough

# Such as hdfs://127.0.0.1:8020, a name node that lets anybody write below /.
GIVEN = os.environ.get("HSR_TEST_HDFS")
HOSTILE = "a b'c é%20#+?"


@pytest.fixture(scope="module")
def name_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if GIVEN:
        yield GIVEN
    else:
        with hdfs_server(tmp_path_factory.mktemp("hdfs")) as url:
            yield url


@pytest.fixture
def folder(name_node: str) -> Iterator[Location]:
    place = Location(f"{name_node}/hsr-{uuid.uuid4().hex[:8]} {HOSTILE}")
    place.make_folder()
    yield place
    place.delete_folder()


def test_files(folder: Location) -> None:
    file = folder.join("x", "file")
    assert not file.exists()
    assert folder.join("nothing").list() == []
    assert folder.join("nothing").files() == []
    file.write_text("old")
    file.write_text("new")  # in place of the old one
    assert file.read_text() == "new"
    assert [(stat.name, stat.size) for stat in folder.files()] == [("x/file", 3)]
    known = file.stat()
    assert known is not None
    assert known.changed > 1.6e18
    assert [place.name for place in folder.list()] == ["x"]
    folder.join("x").move_to(folder.join("y"))
    assert folder.join("y", "file").read_text() == "new"
    with pytest.raises(OSError, match="is not empty") as caught:
        folder.join("y").move_to(make(folder.join("z")))
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        file.delete_file()


def make(folder: Location) -> Location:
    folder.join("file").write_text("there already")
    return folder


def test_two_writers(folder: Location) -> None:
    directory = RunDirectory(folder)
    directory.check_writable()
    with directory.lease(), pytest.raises(RunDirectoryError, match=str(os.getpid())):
        directory.lease().__enter__()
    assert not directory.lock.exists()


@pytest.mark.spark
def test_a_dataset(folder: Location, spark: Any) -> None:
    frame = spark.range(500).selectExpr("id", "array(cast(id as float), 1f) as v").repartition(3)
    for _ in range(2):  # written, then found again
        data = prepare_dataset(frame, ["id", "v"], data_dir=str(folder.join("data")))
    batches = list(data.epoch(0, rank=0, size=1, batch_size=64))
    assert sorted(int(i) for batch in batches for i in batch["id"]) == list(range(500))
    frame.write.parquet(folder.join("parquet").spark_url)
    direct = prepare_dataset(str(folder.join("parquet")), ["id", "v"])
    assert isinstance(direct, Dataset)
    total = sum(int(batch["id"].sum()) for batch in direct.share(rank=0, size=1, batch_size=99))
    assert total == sum(range(500))


@pytest.mark.spark
def test_pipelines(folder: Location, spark: Any, tmp_path: Path) -> None:
    import keras
    from pyspark.ml import Pipeline, PipelineModel

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    save_run(tmp_path / "run", model, [Column("x", "float32", (3,))])
    frame = spark.createDataFrame([([1.0, 2.0, 3.0],)], "x array<float>")
    place = folder.join("pipeline").spark_url
    transformer = TFTransformer.from_run(tmp_path / "run", prediction_col="p")
    for _ in range(2):
        PipelineModel([transformer]).write().overwrite().save(place)
        assert PipelineModel.load(place).transform(frame).first().p == 6.0
    estimator = HorovodEstimator(modelFn="no.such:model", epochs=3)
    for _ in range(2):
        Pipeline(stages=[estimator]).write().overwrite().save(place)
        (loaded,) = Pipeline.load(place).getStages()
        assert (loaded.uid, loaded.getEpochs()) == (estimator.uid, 3)


@pytest.mark.mpi
@pytest.mark.spark
def test_a_run_survives_a_kill(folder: Location, spark: Any, tmp_path: Any) -> None:
    frame = make_frame(spark)
    place, data = str(folder.join("run")), {"data_dir": str(folder.join("data"))}
    run = train(frame, place, [Fault(33, 1, "sigkill")], str(tmp_path), data=data)
    assert [attempt.ending for attempt in run.summary.attempts][-1] == "finished"
    assert run.summary.attempts[1].first_step in (28, 32)
    undisturbed = train(frame, str(tmp_path / "run"), [], str(tmp_path), data=data)
    loaded = TFTransformer.from_run(place)
    assert loaded.summary.history == run.summary.history == undisturbed.summary.history
    before, after = (t.transform(frame).toPandas() for t in (undisturbed, loaded))
    column = after.columns[-1]
    np.testing.assert_array_equal(np.stack(before[column]), np.stack(after[column]))
    assert not RunDirectory(place).lock.exists()
