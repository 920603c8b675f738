"""A training in MLflow, read back by MLflow's own client: logged completely, and once."""

from __future__ import annotations

import builtins
import logging
import threading
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.cluster.protocol.messages import Progress
from horovod_spark_runner.config.training import MlflowOptions
from horovod_spark_runner.errors import EnvironmentProblem, InvalidInputError, RunCancelledError
from horovod_spark_runner.observe.mlflow import begin_tracking, check_tracking
from horovod_spark_runner.storage.paths import redact_url

SETTINGS = {
    "fit": {"batch_size": 32, "epochs": 2},
    "data": {"validation": 0.25, "shapes": {}},
    "feature_cols": ["a", "b"],
    "initial_weights": "s3://key:secret@bucket/run?token=secret",
}


@pytest.fixture(autouse=True)
def file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def options(place: Path, **fields: Any) -> MlflowOptions:
    return MlflowOptions(
        **{"tracking_uri": (place / "store").as_uri(), "experiment": "digits", **fields}
    )


def begin(place: Path, settings: Any = SETTINGS, **fields: Any) -> Any:
    chosen = options(place, **fields)
    directory = RunDirectory(str(place / "run"))
    directory.location.make_folder()
    return begin_tracking(check_tracking(chosen), chosen, directory, settings)


def epoch(number: int, **metrics: float) -> Progress:
    return Progress(number, 9, 5, 5, 5 * number + 5, metrics, 100.0)


def read(place: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient((place / "store").as_uri())
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def points(place: Path, key: str) -> list[tuple[int, float]]:
    client, run = read(place)
    return sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, key))


def test_what_is_logged(tmp_path: Path) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "model.keras").write_bytes(b"weights")
    training = begin(tmp_path, run_name="first", tags={"team": "a"})
    training.epoch(epoch(0, loss=2.0, val_loss=3.0))
    # The report of the second epoch is lost; the third has a value that is no number. A metric of
    # the fourth is called like what the run itself tells.
    training.epoch(epoch(3, samples_per_second=7.0))
    training.finish(
        [
            {"loss": 2.0, "val_loss": 3.0},
            {"loss": 1.0, "f1[0]": 0.5},
            {"loss": float("nan")},
            {"samples_per_second": 7.0, "f(1)": 1.0, "f[1]": 2.0, "f_1_": 3.0},
        ]
    )
    client, run = read(tmp_path)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.tags["team"] == "a"
    assert run.data.params == {
        "batch_size": "32",
        "epochs": "2",
        "data.validation": "0.25",
        "data.shapes": "{}",
        "feature_cols": '["a", "b"]',
        "initial_weights": "s3://bucket/run",
    }
    assert points(tmp_path, "loss")[:2] == [(0, 2.0), (1, 1.0)]
    assert len(points(tmp_path, "loss")) == 3
    assert points(tmp_path, "val_loss") == [(0, 3.0)]
    assert points(tmp_path, "f1_0_") == [(1, 0.5)]
    assert points(tmp_path, "samples_per_second") == [(0, 100.0), (3, 7.0)]
    # Two that MLflow would take for a third have names of their own.
    assert {key: run.data.metrics[key] for key in run.data.metrics if key.startswith("f_")} == {
        "f_1_": 3.0,
        "f_1__" + f"{crc32(b'f(1)'):08x}": 1.0,
        "f_1__" + f"{crc32(b'f[1]'):08x}": 2.0,
    }
    assert points(tmp_path, "run/samples_per_second") == [(3, 100.0)]
    files = client.list_artifacts(run.info.run_id, "model")
    assert [file.path for file in files] == ["model/model.keras"]
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not [data for data in stored if b"secret" in data]


def test_a_training_that_goes_on_is_one_run(tmp_path: Path) -> None:
    training = begin(tmp_path)
    training.epoch(epoch(0, loss=2.0))
    training.epoch(epoch(1, loss=1.5))
    training.fail(RuntimeError("lost"))
    assert read(tmp_path)[1].info.status == "FAILED"
    more = {**SETTINGS, "fit": {"batch_size": 32, "epochs": 3}}
    training = begin(tmp_path, more, log_model=False)
    training.epoch(epoch(1, loss=1.5))  # trained again, to the same value
    training.epoch(epoch(2, loss=1.0))
    training.finish([{"loss": 2.0}, {"loss": 1.5}, {"loss": 1.0}])
    assert points(tmp_path, "loss") == [(0, 2.0), (1, 1.5), (2, 1.0)]
    run = read(tmp_path)[1]
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "2"  # which MLflow does not change
    assert run.data.tags["resumed.epochs"] == "3"


def test_a_cancelled_training_is_killed(tmp_path: Path) -> None:
    begin(tmp_path).fail(RunCancelledError("job cancelled"))
    assert read(tmp_path)[1].info.status == "KILLED"


def test_a_failure_of_mlflow_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(tmp_path, log_model=False)
    log_batch = training._client.log_batch
    blocked = threading.Event()

    def failing(*arguments: Any, **named: Any) -> None:
        if not blocked.is_set():
            raise ConnectionError(f"{training._options.tracking_uri} is away")
        log_batch(*arguments, **named)

    monkeypatch.setattr(training._client, "log_batch", failing)
    with caplog.at_level(logging.WARNING):
        training.epoch(epoch(0, loss=2.0))
        training.epoch(epoch(1, loss=1.0))
        while not training._work.empty():
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)
        blocked.set()
        training.finish([{"loss": 2.0}, {"loss": 1.0}])
    messages = [r.getMessage() for r in caplog.records if "MLflow" in r.getMessage()]
    assert len(messages) == 1
    assert "ConnectionError" in messages[0]
    # What could not be logged while it ran is there at the end.
    assert points(tmp_path, "loss") == [(0, 2.0), (1, 1.0)]


def test_wrong_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="nowhere://host/store") as e:
        check_tracking(options(tmp_path, tracking_uri="nowhere://me:secret@host/store"))
    assert "secret" not in str(e.value)
    assert "secret" not in repr(MlflowOptions(tracking_uri="http://me:secret@host"))
    with pytest.raises(InvalidInputError, match=r"http://127\.0\.0\.1:9\b"):
        check_tracking(options(tmp_path, tracking_uri="http://me:secret@127.0.0.1:9"))
    with pytest.raises(InvalidInputError, match="tags"):
        MlflowOptions(tags={"a": 1})  # type: ignore[dict-item]
    imported = builtins.__import__

    def without_mlflow(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "mlflow":
            raise ImportError(name)
        return imported(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_mlflow)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'horovod_spark_runner\[mlflow\]'"):
        check_tracking(options(tmp_path))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:5000/a?token=b#c", "http://host:5000/a"),
        ("mysql://me:secret@host/db", "mysql://host/db"),
        ("databricks://profile", "databricks://profile"),
        ("/a/folder", "/a/folder"),
        ("http://[half", "http://…"),
    ],
)
def test_secrets_are_left_out(text: str, shown: str) -> None:
    assert redact_url(text) == shown
