"""Runs whose directory is in an object store: moto's S3 server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    HorovodEstimator,
    InvalidInputError,
    RunDirectoryError,
    TFTransformer,
)
from horovod_spark_runner.checkpoint import attachments
from horovod_spark_runner.checkpoint.files import (
    CheckpointInfo,
    load_checkpoint,
    newest_checkpoint,
    newest_readable,
    prune_checkpoints,
    save_checkpoint,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.training import CheckpointOptions
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.storage import lease as lease_module
from horovod_spark_runner.storage.contents import Contents
from horovod_spark_runner.storage.filesystem import Location
from tests.faults.injection import Fault
from tests.faults.training import make_frame, train
from tests.object_store import s3_server
from tests.runs import curves_in, save_run

SECRET = "not-to-be-found-in-files"
# Where nobody listens: what goes through a proxy instead of straight to the server fails.
PROXY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """Environment variables that lead to an S3 server with one bucket."""
    pytest.importorskip("moto.server")
    import boto3

    with s3_server() as url:
        environment = {
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "http_proxy": PROXY,
            "AWS_ENDPOINT_URL": url,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("http_proxy", PROXY)
            client = boto3.client(
                "s3",
                endpoint_url=url,
                region_name="us-east-1",
                aws_access_key_id="somebody",
                aws_secret_access_key=SECRET,
            )
            client.create_bucket(Bucket="bucket")
        yield environment


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return server


def save(directory: RunDirectory, step: int) -> Location:
    info = CheckpointInfo(step, 1, [{"loss": 0.5}], "abc", [], "an.engine")
    return save_checkpoint(directory, info, {"variables.npz": {"a": np.full(1000, step)}})


def test_checkpoints_in_an_object_store(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory("s3://bucket/one/run")
    directory.check_writable()
    assert newest_checkpoint(directory) is None
    for step in (10, 20, 30):
        save(directory, step)
        prune_checkpoints(directory, step, CheckpointOptions(keep=2))
    assert directory.checkpoint_steps() == [30, 20]
    directory.checkpoint(30).join("checkpoint.json").delete_file()  # a writer that was killed
    newest = newest_checkpoint(directory)
    assert newest is not None
    assert newest[1].step == 20
    save(directory, 30)
    directory.checkpoint(30).join("variables.npz").write_bytes(b"other")
    readable = newest_readable(directory, load_checkpoint)
    assert readable is not None
    assert readable[1].step == 20
    monkeypatch.setattr(attachments, "SMALL_BYTES", 2)
    with attachments.open_attachments(directory) as attach:
        assert attachments.contents_of(attach(Contents(b"more"))).read() == b"more"
        assert directory.attachments.exists()
    assert not directory.attachments.exists()


@pytest.mark.thorough
def test_two_writers_in_an_object_store(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "SETTLE_SECONDS", 0.05)
    directory = RunDirectory("s3://bucket/locked")
    directory.check_writable()
    with directory.lease():
        with pytest.raises(RunDirectoryError, match=str(os.getpid())):
            directory.lease().__enter__()
        held = json.loads(directory.lock.read_text())
    assert not directory.lock.exists()
    directory.lock.write_text(json.dumps({**held, "host": "other", "renewed": time.time() - 99}))
    with directory.lease():
        pass


@pytest.mark.thorough
def test_a_rank_that_lacks_the_drivers_credentials_says_so(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "SETTLE_SECONDS", 0.05)
    directory = RunDirectory("s3://bucket/lacking")
    with directory.lease() as lease, monkeypatch.context() as rank:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            rank.delenv(name)
        rank.setenv("https_proxy", PROXY)
        # As the ranks make it: with a client of their own.
        run_directory = RunDirectory("s3://bucket/lacking", lease.token)
        with pytest.raises(InvalidInputError, match="AWS_"):
            run_directory.check_held()


@pytest.mark.thorough
@pytest.mark.spark
def test_a_transformer_saved_in_an_object_store(
    s3: dict[str, str], spark: Any, tmp_path: Any
) -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    save_run(tmp_path / "run", model, [Column("x", "float32", (3,))])
    frame = spark.createDataFrame([([1.0, 2.0, 3.0],)], "x array<float>")
    for place in ("s3://bucket/stages/one", "s3a://bucket/stages/two"):
        TFTransformer.from_run(tmp_path / "run", prediction_col="p").save(place)
        with pytest.raises(RunDirectoryError, match="already"):
            TFTransformer.load(place).save(place)
        loaded = TFTransformer.load(place).setPredictionCol("q")
        Location(place).join("model", "left.bin").write_bytes(b"of another model")
        loaded.write().overwrite().save(place)
        assert TFTransformer.load(place).transform(frame).first().q == 6.0
        names = {file.name for file in Location(place).files()}
        assert names == {
            "metadata/_SUCCESS",
            "metadata/part-00000",
            "model/model.keras",
            "model/sample.npz",
            "model/signature.json",
            "model/weights.npz",
        }


@pytest.mark.spark
def test_an_estimator_saved_in_an_object_store(s3: dict[str, str], spark: Any) -> None:
    estimator = HorovodEstimator(modelFn="no.such:model", epochs=3)
    for place in ("s3://bucket/estimators/one", "s3a://bucket/estimators/two"):
        estimator.save(place)
        with pytest.raises(RunDirectoryError, match="already"):
            estimator.save(place)
        loaded = HorovodEstimator.load(place)
        assert (loaded.uid, loaded.getEpochs()) == (estimator.uid, 3)
        loaded.setEpochs(4).write().overwrite().save(place)
        assert HorovodEstimator.load(place).getEpochs() == 4
    with pytest.raises(RunDirectoryError, match="stage"):
        HorovodEstimator.load("s3://bucket/estimators/three")


@pytest.mark.mpi
@pytest.mark.spark
def test_a_run_in_an_object_store_survives_a_kill(
    s3: dict[str, str], spark: Any, tmp_path: Any
) -> None:
    frame = make_frame(spark)
    data, launch = {"data_dir": str(tmp_path / "data")}, {"env": s3}
    place = "s3://bucket/runs/one"
    faults = [Fault(33, 1, "sigkill")]
    run = train(frame, place, faults, str(tmp_path), data=data, launch=launch)
    assert len(run.summary.history) == 3
    assert [attempt.ending for attempt in run.summary.attempts][-1] == "finished"
    assert run.summary.attempts[1].first_step in (28, 32)
    loaded = TFTransformer.from_run(place)
    assert loaded.summary.history == run.summary.history
    (tmp_path / "train").mkdir()
    for events in RunDirectory(place).events.join("train").list():  # of each attempt
        (tmp_path / "train" / events.name).write_bytes(events.read_bytes())
    curve = enumerate(run.summary.history)
    losses = [(number, np.float32(logs["loss"])) for number, logs in curve]
    assert curves_in(tmp_path / "train")["loss"] == losses
    for path in list_all(Location(place)):
        assert SECRET.encode() not in path.read_bytes()
    assert not RunDirectory(place).lock.exists()


def list_all(folder: Location) -> Iterator[Location]:
    for entry in folder.list():
        if entry.is_folder:
            yield from list_all(entry)
        else:
            yield entry
