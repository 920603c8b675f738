"""Tables and files in an object store, which Spark reaches by ``s3a://`` and Python by ``s3://``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from horovod_spark_runner import InvalidInputError, LaunchOptions, TFTransformer
from tests.numpy_engine import Line
from tests.object_store import empty_folder, s3_server

from .conftest import train


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(lake: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that Spark reaches by its own settings, and Python by the environment."""
    empty_folder(server, "s3://lake/here", monkeypatch)
    settings = lake.sparkContext._jsc.hadoopConfiguration()
    for name, value in {
        "access.key": "key",
        "secret.key": "secret",
        "endpoint": server,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
    }.items():
        settings.set(f"fs.s3a.{name}", value)
    return "lake/here"


def test_a_training_in_an_object_store(lake: Any, points: Any, bucket: str) -> None:
    table, files = f"s3a://{bucket}/table", f"s3a://{bucket}/files"
    points.write.format("delta").save(table)
    points.write.parquet(files)
    frame = lake.read.format("delta").load(table)
    # Of a session that was made before, the ranks have no such variables.
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    launch = LaunchOptions(env=env)
    held_out = lake.read.parquet(files)
    train(frame, f"s3://{bucket}/run", validation=held_out, launch=launch)
    out = f"s3a://{bucket}/predictions"
    loaded = TFTransformer.from_run(f"s3://{bucket}/run", model_fn=Line())
    loaded.transform(frame).write.format("delta").save(out)
    assert lake.read.format("delta").load(out).count() == 160
    for place in (files, files.replace("s3a:", "s3:")):  # read in place
        run = train(place, f"s3://{bucket}/in-place", launch=launch)
        assert len(run.summary.history) == 1


def test_credentials_of_spark_are_not_those_of_python(
    lake: Any, points: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    points.write.mode("overwrite").parquet(f"s3a://{bucket}/files")
    frame = lake.read.parquet(f"s3a://{bucket}/files")
    with pytest.raises(InvalidInputError, match=r"AWS_.*fs\.s3a\."):
        train(frame, f"s3://{bucket}/run")
