"""Searches: real trainings of tiny models, chosen by optuna."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pyarrow as pa
import pytest
from mlflow import MlflowClient

from horovod_spark_runner import (
    InvalidInputError,
    MlflowOptions,
    RunCancelledError,
    RunDirectoryError,
    RunFailedError,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.tune import TuneResult, choice, integer, loguniform, tune

from ..jobs import descriptions
from . import tune_cases

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

SPACE = {"lr": loguniform(1e-3, 1e-1), "units": choice(2, 4), "batch_size": integer(8, 32)}
any_search = partial(tune, validation="held_out", parallel=1, stream_logs=False, seed=5)
search = partial(any_search, space=SPACE, epochs=2)
build = tune_cases.build


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    return spark.createDataFrame(tune_cases.ROWS, tune_cases.SCHEMA).repartition(2).cache()


def chosen(result: TuneResult) -> pd.DataFrame:
    """Return what is the same for the same seed."""
    names = [name for name in result.trials if name not in ("seconds", "fit_seconds", "run_dir")]
    table: pd.DataFrame = result.trials[names]
    return table


@pytest.fixture(scope="module")
def whole(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[TuneResult, Path, Path]:
    """A search of four trials, its study, and where it was noted how often rows were computed."""
    folder = tmp_path_factory.mktemp("whole")
    computed, study = folder / "computed", folder / "study with a space"
    computed.mkdir()

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        (computed / f"{time.monotonic_ns()}-{os.getpid()}").touch()
        yield from batches

    def counting(params: dict[str, Any]) -> Any:
        seen = len(list(computed.iterdir()))
        (folder / f"seen-{time.monotonic_ns()}").write_text(str(seen))
        return build(params)

    counted = rows.mapInArrow(count, rows.schema)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        result = search(counted, counting, max_trials=4, study_dir=study, stream_logs=True)
    (folder / "shown").write_text(shown.getvalue())
    return result, study, folder


@pytest.mark.thorough
def test_the_best_model_is_the_one_that_was_trained(
    whole: tuple[TuneResult, Path, Path], rows: Any
) -> None:
    result, study, _ = whole
    table = result.trials
    assert list(table["state"]) == ["finished"] * 4
    assert list(table["epochs"]) == [2] * 4
    assert (table["fit_seconds"] > 0).all()
    assert (table["fit_seconds"] < table["seconds"]).all()
    best = table.sort_values("value").iloc[0]
    assert (result.best_trial, result.best_value) == (best["trial"], best["value"])
    assert result.best_params == {name: best[f"params.{name}"] for name in SPACE}
    held_out = result.best_transformer.transform(rows.filter("held_out").coalesce(1))
    error = held_out.selectExpr("avg(power(prediction - label, 2))").first()[0]
    assert error == pytest.approx(result.best_value, rel=1e-5)
    summary = result.best_transformer.summary
    assert summary.run_dir == best["run_dir"] == str(study / "trials" / f"trial-{best['trial']:05}")


def test_trials_have_their_names_in_spark(whole: tuple[TuneResult, Path, Path], spark: Any) -> None:
    _, study, _ = whole
    told = [one for one in descriptions(spark) if f" of {study.name}: Horovod on 1 rank" in one]
    assert {one.partition(" of ")[0] for one in told} >= {
        f"Horovod: trial {number}" for number in range(4)
    }
    # What imports ahead of ranks takes a slot: it goes on while rows are written, once for all.
    ahead = [one for one in descriptions(spark) if "import" in one]
    assert ahead
    assert not [one for one in ahead if "trial" in one]


def test_a_search_shows_its_trials_and_the_folder_of_the_best(
    whole: tuple[TuneResult, Path, Path],
) -> None:
    result, _, folder = whole
    lines = (folder / "shown").read_text().splitlines()
    assert "preparing the data" in lines
    trials = [line for line in lines if re.match(r"trial \d+ \{'lr': ", line)]
    assert len(trials) == 4
    best = result.trials.set_index("trial").loc[result.best_trial]
    assert lines[-1].startswith(f"best: trial {result.best_trial} {{'lr': ")
    assert lines[-1].endswith(best["run_dir"])
    text = result._repr_html_()
    assert f"{best['run_dir']}/report.html" in text
    assert len(re.findall(r"<tr><td>\d<", text)) == 3
    assert len(re.findall(rf"<tr><th>{result.best_trial}<", text)) == 1


def test_rows_are_computed_for_the_first_trial_only(whole: tuple[TuneResult, Path, Path]) -> None:
    _, study, folder = whole
    in_the_end = len(list((folder / "computed").iterdir()))
    seen = [int(path.read_text()) for path in folder.glob("seen-*")]
    assert len(seen) >= 4
    assert set(seen) == {in_the_end}
    assert not list((study / "data").iterdir()), "and deleted with the last"


@pytest.mark.thorough
def test_a_study_that_goes_on_chooses_as_if_it_had_never_ended(
    whole: tuple[TuneResult, Path, Path], rows: Any, tmp_path: Path
) -> None:
    part = search(rows, build, max_trials=2, study_dir=tmp_path / "s")
    assert len(part.trials) == 2
    again = search(rows, build, max_trials=4, study_dir=tmp_path / "s", resume="required")
    pd.testing.assert_frame_equal(chosen(again), chosen(whole[0]))


def test_show(whole: tuple[TuneResult, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    result, study, _ = whole
    assert main(["tune", "show", str(study)]) == 0
    shown = capsys.readouterr().out
    assert "trials  4: 4 finished\n" in shown
    assert f"best    trial {result.best_trial}: {result.best_value:.4g} with" in shown
    assert main(["tune", "show", str(study), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == result.best_trial
    assert main(["tune", "show", str(study.parent)]) == 1
    assert "no study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"space": {"lr": loguniform(1e-3, 1.0)}}, r"study.* lr .*Range\(low=0.001, high=0.1,"),
        ({"epochs": 3}, r"study.*epochs.*\b2\b.*\b3"),
        ({"workers_per_trial": 2}, r"study.*num_workers.*\b1\b.*\b2"),
        ({"resume": "never"}, "resume='never'.*study_dir"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_search_is_refused(
    whole: tuple[TuneResult, Path, Path], rows: Any, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(RunDirectoryError, match=told):
        search(rows, build, max_trials=9, study_dir=whole[1], **changed)


@pytest.mark.parametrize("lost", ["study.json", "journal.log"])
def test_what_is_left_of_a_study_is_refused(
    whole: tuple[TuneResult, Path, Path], rows: Any, tmp_path: Path, lost: str
) -> None:
    left = tmp_path / "left"
    shutil.copytree(whole[1], left)
    (left / lost).unlink()
    for resume in ("auto", "never"):
        with pytest.raises(RunDirectoryError, match=lost if resume == "auto" else "left"):
            search(rows, build, max_trials=4, study_dir=left, resume=resume)


@pytest.mark.thorough
def test_what_lies_where_a_trial_goes_ends_the_search(
    whole: tuple[TuneResult, Path, Path],
    rows: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As after a journal that was put back: no trial fails of it."""
    left = tmp_path / "left"
    shutil.copytree(whole[1], left)
    shutil.copytree(left / "trials" / "trial-00000", left / "trials" / "trial-00004")
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match="trial-00004 .*sear"):
            search(rows, build, max_trials=6, study_dir=left)
        capsys.readouterr()
        assert main(["tune", "show", str(left), "--json"]) == 0
        trials = json.loads(capsys.readouterr().out)["trials"]
        assert [one["state"] for one in trials] == [*["finished"] * 4, "interrupted"]


def test_other_rows_are_refused(whole: tuple[TuneResult, Path, Path], rows: Any) -> None:
    with pytest.raises(RunDirectoryError, match="study.*rows"):
        search(rows.filter("label > 0"), build, max_trials=9, study_dir=whole[1])


@pytest.mark.thorough
def test_failed_trials_are_marked_and_those_cut_short_tried_again(
    rows: Any, tmp_path: Path
) -> None:
    """Side by side: one raises, one is killed in its first attempt, two train."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def fragile(params: dict[str, Any]) -> Any:
        if params["how"] == "raise":
            raise KeyError("no such layer")
        if params["how"] == "kill" and not (marks / "killed").exists():
            (marks / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return build({"lr": 0.01, "units": 2})

    grid = optuna.samplers.GridSampler({"how": ["raise", "kill", "a", "b"]}, seed=0)
    result = search(
        rows,
        fragile,
        space=lambda trial: {"how": trial.suggest_categorical("how", ["raise", "kill", "a", "b"])},
        sampler=grid,
        parallel=2,
        max_trials=4,
        study_dir=tmp_path / "s",
    )
    table = result.trials.set_index("params.how")
    assert dict(table["state"]) == {
        "raise": "failed",
        "kill": "finished",
        "a": "finished",
        "b": "finished",
    }
    assert "no such layer" in table["error"]["raise"]
    attempts = {how: Path(place, "attempts.jsonl") for how, place in table["run_dir"].items()}
    endings = {how: path.read_text().count('"ending"') for how, path in attempts.items()}
    assert endings == {"raise": 1, "kill": 2, "a": 1, "b": 1}


class PruneSecond(optuna.pruners.BasePruner):
    """Prunes the second trial after its first epoch, and notes when."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.when = 0.0

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        self.asked.append((trial.number, max(trial.intermediate_values)))
        if trial.number != 1:
            return False
        self.when = time.time()
        return True


def test_a_pruned_trial_frees_its_slots_at_once_and_is_no_failure(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    store = (tmp_path / "mlflow").as_uri()
    pruner = PruneSecond()
    result = any_search(
        rows,
        tune_cases.slow_when_long,
        space=lambda trial: {
            "epochs": 300 if trial.number == 1 else 2,
            "lr": trial.suggest_float("lr", 1e-3, 1e-2),
        },
        pruner=pruner,
        callbacks=tune_cases.callbacks,
        max_trials=3,
        workers_per_trial=2,
        mlflow=MlflowOptions(tracking_uri=store, experiment="search", log_model=False),
        study_dir=tmp_path / "s",
    )
    assert list(result.trials["state"]) == ["finished", "pruned", "finished"]
    client = MlflowClient(store)
    told = {
        one.info.run_name: one
        for one in client.search_runs([client.get_experiment_by_name("search").experiment_id])
    }
    assert {name: one.info.status for name, one in told.items()} == {
        "trial-00000": "FINISHED",
        "trial-00001": "KILLED",
        "trial-00002": "FINISHED",
    }
    pruned = told["trial-00001"].data
    assert re.search("pruned.* epoch 1", pruned.tags["stopped"])
    assert pruned.params["params.lr"] == str(result.trials["params.lr"][1])
    assert pruner.asked == [(0, 1), (1, 1), (2, 1)]
    assert list(result.trials["epochs"]) == [2, 1, 2]
    study = optuna.load_study(
        study_name="search",
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "s" / "journal.log"))
        ),
    )
    following = study.trials[2].datetime_start
    assert following is not None
    assert following.timestamp() - pruner.when < 5


@pytest.mark.thorough
def test_the_value_is_that_of_the_model_also_where_a_callback_has_changed_it(
    rows: Any, tmp_path: Path
) -> None:
    def worst() -> list[Any]:
        import keras

        stop = keras.callbacks.EarlyStopping("val_loss", mode="max", restore_best_weights=True)
        return [stop]

    one = partial(search, rows, build, max_trials=1, epochs=3, callbacks=worst, workers_per_trial=2)
    result = one(study_dir=tmp_path / "s")
    epochs = result.best_transformer.summary.history
    assert result.best_value == pytest.approx(epochs[0]["val_loss"], rel=1e-5)
    assert result.best_value > 1.01 * epochs[-1]["val_loss"]
    (call,) = RunDirectory(result.best_transformer.summary.run_dir).read_calls()
    assert call["weights"] == "epoch 1, restored by EarlyStopping (monitors val_loss)"
    evaluated = result.best_transformer.evaluate(rows.filter("held_out"))
    assert result.best_value == pytest.approx(evaluated["loss"], rel=1e-5)
    with pytest.raises(RunFailedError, match="'loss'.*metric"):
        one(metric="loss", study_dir=tmp_path / "other")


def when(happened: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Let ``act`` be called once something has happened."""

    def wait() -> None:
        deadline = time.monotonic() + 100
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["interrupt", "cancel"])
def test_what_is_finished_is_kept_and_the_rest_goes_on(
    spark: Any, rows: Any, tmp_path: Path, how: str
) -> None:
    """Two trials at once: one has finished, one trains when the search is ended."""
    study = tmp_path / "s"

    def go(parallel: int) -> TuneResult:
        return any_search(
            rows,
            tune_cases.slow_when_long,
            space=lambda trial: {
                "epochs": 20 if trial.number == 1 else 2,
                "lr": trial.suggest_float("lr", 1e-3, 1e-2),
            },
            callbacks=tune_cases.callbacks,
            parallel=parallel,
            max_trials=2,
            study_dir=study,
        )

    def both() -> bool:
        trials = study / "trials"
        long = trials / "trial-00001" / "metrics.jsonl"
        short = trials / "trial-00000" / "attempts.jsonl"
        ended = short.exists() and '"ending": "finished"' in short.read_text()
        return ended and long.exists() and len(long.read_text().splitlines()) >= 2

    if how == "interrupt":
        thread = when(both, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            go(2)
    else:
        context = spark.sparkContext
        context.setJobGroup("search", "all trials are jobs of it", interruptOnCancel=True)
        thread = when(both, lambda: context.cancelJobGroup("search"))
        with pytest.raises(RunCancelledError, match="same call"):
            go(2)
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)
    thread.join()
    result = go(1)
    assert list(result.trials["state"]) == ["finished", "finished"]
    assert list(result.trials["epochs"]) == [2, 20]
    attempts = (study / "trials" / "trial-00001" / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 2
    assert '"first_step": 0' not in attempts[1], "it went on from its checkpoint"
    assert (study / "trials" / "trial-00000" / "attempts.jsonl").read_text().count("\n") == 1


def test_a_search_that_was_killed_with_its_driver_goes_on(rows: Any, tmp_path: Path) -> None:
    study = tmp_path / "s"
    killed = subprocess.run(
        [sys.executable, "-m", "tests.mpi.tune_cases", str(study)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    with (study / "journal.log").open("a") as journal:  # what it had half written
        journal.write('{"op_code": 4, "wor')
    result = tune_cases.search(rows, study)
    assert list(result.trials["state"]) == ["finished"] * 3
    assert list(result.trials["epochs"]) == [3] * 3
    attempts = (study / "trials" / "trial-00001" / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 2
    assert '"first_step": 0' not in attempts[1]
    unbroken = tune_cases.search(rows, tmp_path / "unbroken")
    pd.testing.assert_frame_equal(
        chosen(result).drop(columns="value"), chosen(unbroken).drop(columns="value")
    )
    assert list(result.trials["value"]) == pytest.approx(list(unbroken.trials["value"]), rel=1e-5)


@pytest.mark.thorough
def test_a_metric_that_is_not_there_ends_the_search(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="metric.* loss, val_loss"):
        search(
            rows,
            build,
            metric="val_acuracy",
            direction="max",
            max_trials=3,
            study_dir=tmp_path / "s",
        )
    assert len(list((tmp_path / "s" / "trials").iterdir())) == 1


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"validation": None}, "metric='val_loss'.*validation"),
        ({"validation_freq": 2}, "validat"),
        ({"metric": "val_mae"}, "direction"),
        ({"direction": "least"}, "direction.* min, max.*'least'"),
        ({"num_workers": 2}, "tune.*'num_workers'"),
        ({"model_fn": lambda: None}, "trial.*parameters"),
        ({"model_fn": "model.keras"}, "function.*model"),
        ({"max_trials": 0}, "max_trials.* 1"),
        ({"resume": "required"}, "no study"),
        ({"study_dir": "s3://bucket/study"}, "file system"),
        ({"epochs": 1, "pruner": "asha"}, "epochs=1"),
        ({"feature_cols": ["colour"]}, "'colour'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_searched_is_refused_at_once(
    rows: Any, tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    asked = {"model_fn": build, "study_dir": tmp_path / "s", **changed}
    with pytest.raises(InvalidInputError, match=told):
        search(rows, **asked)
    assert not (tmp_path / "s" / "trials").exists()


def test_feature_columns_are_not_guessed(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="search.*feature_cols"):
        search(rows.withColumnRenamed("features", "x"), build, study_dir=tmp_path / "s")


@pytest.mark.thorough
def test_a_search_whose_trials_all_fail_says_why(rows: Any, tmp_path: Path) -> None:
    def broken(params: dict[str, Any]) -> Any:
        raise KeyError("no such layer")

    with pytest.raises(RunFailedError, match="2 trials.* 0 .*pruned.* 2 .*failed.*trial"):
        search(rows, broken, parallel=2, max_trials=2, study_dir=tmp_path / "s")
