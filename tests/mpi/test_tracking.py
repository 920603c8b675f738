"""Trainings that MLflow is told of, while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import HorovodEstimator, MlflowOptions

from ..trainings import digits_model, train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


@pytest.fixture(autouse=True)
def file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def runs(uri: str, experiment: str) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    return client, list(
        client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    )


def test_a_training_is_logged_while_it_runs_and_goes_on_in_the_same_run(
    digits_df: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"

    def callbacks() -> list[Any]:
        import time

        import keras

        class Waiting(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                until = time.monotonic() + 60
                while epoch and not list(store.glob("*/*/metrics/val_loss")):
                    assert time.monotonic() < until, "epoch 0 is not in MLflow"
                    time.sleep(0.05)

        return [Waiting()]

    frame, run_dir = digits_df.filter("id < 200"), tmp_path / "run"
    given = MlflowOptions(tracking_uri=store.as_uri(), experiment="digits", tags={"by": "test"})
    arguments: dict[str, Any] = {"validation": 0.25, "mlflow": given, "callbacks": callbacks}
    train(frame, run_dir, epochs=2, **arguments)
    history = train(frame, run_dir, epochs=3, **arguments).summary.history
    client, (run,) = runs(store.as_uri(), "digits")
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        found = client.get_metric_history(run.info.run_id, name)
        assert [(p.step, p.value) for p in found] == [(n, h[name]) for n, h in enumerate(history)]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["num_workers"] == "2"
    assert run.data.tags["resumed.epochs"] == "3"
    logged = {file.path for file in client.list_artifacts(run.info.run_id, "model")}
    assert {"model/model.keras", "model/signature.json"} <= logged


@pytest.mark.thorough
def test_fits_of_an_estimator_are_runs_each(digits_df: Any, tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    estimator = HorovodEstimator(
        modelFn=digits_model,
        featuresCol="image",
        labelCol="digit",
        numWorkers=2,
        runDir=str(tmp_path / "runs"),
        streamLogs=False,
        mlflow={"tracking_uri": uri, "experiment": "grid", "log_model": False},
    )
    maps = [{estimator.modelArgs: {"width": width}} for width in (4, 8)]
    estimator.fit(digits_df.filter("id < 100"), maps)
    _, found = runs(uri, "grid")
    assert sorted(run.info.run_name for run in found) == ["fit-00", "fit-01"]
    assert {run.info.status for run in found} == {"FINISHED"}
    assert all("loss" in run.data.metrics for run in found)
