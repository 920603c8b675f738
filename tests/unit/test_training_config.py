"""Validation of a training's configuration before anything is done, without Spark or Keras."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import api, run_training
from horovod_spark_runner.checkpoint.files import CheckpointInfo, save_checkpoint
from horovod_spark_runner.checkpoint.resume import StartingPoint
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.cluster.spark import session
from horovod_spark_runner.config.data import DataOptions
from horovod_spark_runner.config.launch import LaunchOptions, LaunchSettings
from horovod_spark_runner.config.sync import Allreduce
from horovod_spark_runner.config.training import (
    CheckpointOptions,
    FitOptions,
    InitialWeights,
    MlflowOptions,
    RestartOptions,
    TrainingConfig,
)
from horovod_spark_runner.engines.keras.engine import ENGINE
from horovod_spark_runner.errors import DataError, InvalidInputError, RunDirectoryError
from horovod_spark_runner.observe.console import Console
from horovod_spark_runner.run.columns import Columns, _by_convention, by_name
from horovod_spark_runner.run.resolve import ResolvedRun, resolve_again
from horovod_spark_runner.training.spec import Binding, ModelNames, ModelSource, check_objects


def test_a_default_place_is_nobodys_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "runs_on_this_machine", bool)
    monkeypatch.setattr(time, "strftime", lambda _: "20261025-023000")
    spark: Any = True
    one, other = (session.new_folder(spark, "run_dir", "runs") for _ in range(2))
    assert one != other
    assert str(one).startswith(str(tmp_path / "runs" / "20261025-023000-"))
    spark = False
    with pytest.raises(InvalidInputError, match="run_dir"):
        session.new_folder(spark, "run_dir", "runs")
    assert str(session.new_folder(spark, "runDir", "runs", "s3://b/r")).startswith(
        "s3://b/r/20261025-"
    )


def config(**arguments: Any) -> TrainingConfig:
    return TrainingConfig(model_fn=len, feature_cols=["a"], label_cols=["y"], **arguments)


def test_what_another_run_has_left_since_the_checks_is_looked_at_under_the_lock(
    tmp_path: Path,
) -> None:
    directory, engine = RunDirectory(str(tmp_path)), ModelSource().engine

    def resolved(**arguments: Any) -> ResolvedRun:
        allotment: Any = SimpleNamespace(workers=1)
        arguments.setdefault("fit", FitOptions(lr_scaling="linear"))
        configuration = config(**arguments)
        return ResolvedRun(
            df="rows",
            config=configuration,
            model=ModelSource(),
            columns=Columns(Binding(("a",)), Binding(("y",)), None),
            directory=directory,
            launch=LaunchSettings(1),
            allotment=allotment,
            start=StartingPoint(None, (), configuration.fit, None, None),
            seconds=0.0,
            console=Console("run 1", quiet=True),
        )

    first = resolved()
    assert resolve_again(first) is first
    started = {"fit": {"lr_scaling": "sqrt"}}
    info = CheckpointInfo(10, 1, [], "abc", [], engine, settings=started)
    save_checkpoint(directory, info, {})
    now = resolve_again(first)
    assert now.checkpoint == info
    assert now.fit.lr_scaling == "sqrt"  # as the run was begun, and checkpoints go on
    with pytest.raises(RunDirectoryError, match="resume='never'.*run"):
        resolve_again(resolved(resume="never"))
    save_checkpoint(directory, replace(info, engine="another"), {})
    with pytest.raises(RunDirectoryError, match="engine 'another'"):
        resolve_again(first)
    # Its model is none of one epoch.
    save_checkpoint(directory, replace(info, step=12, epoch_step=2), {})
    with pytest.raises(RunDirectoryError, match=r"within epoch 2\b.*epochs=1\b"):
        resolve_again(first)
    # Refused before the rows are prepared.
    within = replace(info, step=14, epoch_step=4, order={"global_batch": 999})
    save_checkpoint(directory, within, {})
    with pytest.raises(RunDirectoryError, match=r"global_batch 999 \(now 32\)\. "):
        resolve_again(resolved(fit=FitOptions(epochs=2)))  # what is not recorded counts as the same


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_dir": ""}, "run_dir.*URL"),
        ({"run_dir": 3}, r"run_dir.*\b3"),
        ({"resume": "yes"}, "resume.*auto, never, required.*'yes'"),
        ({"prediction_col": 3}, "prediction_col"),
        ({"initial_weights": 3}, r"initial_weights.*\b3"),
        ({"initial_weights": ""}, "initial_weights"),
    ],
)
def test_a_configuration_that_is_invalid(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        config(**arguments)


def test_a_configuration_that_is_valid() -> None:
    assert config(run_dir="run").run_dir == "run"
    assert config(initial_weights="run").initial_weights == InitialWeights("run")
    chosen = InitialWeights("run", skip_mismatch=np.True_)  # type: ignore[arg-type]
    assert config(initial_weights=chosen).initial_weights is chosen
    assert type(config(validation=np.float32(0.25)).validation) is float
    assert config(validation=True).validation is True


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(None, ["label"]), (["y"], ["y"]), ([], [])],
)
def test_columns_by_convention(labels: Any, expected: Any) -> None:
    assert _by_convention(labels, ["x", "y", "features", "label"]) == (["features"], expected)
    assert _by_convention(None, ["features", "y"]) == (["features"], None)


AB = (("a", "b"),)


@pytest.mark.parametrize(
    ("names", "labels", "available", "expected"),
    [
        (ModelNames(AB), None, "a b c", ({"a": "a", "b": "b"}, None)),
        (ModelNames(AB), ["c"], "a b c", ({"a": "a", "b": "b"}, ["c"])),
        (ModelNames(AB), {"out": "c"}, "a b c label", ({"a": "a", "b": "b"}, {"out": "c"})),
        (ModelNames(AB, (("y",),), True), None, "a b label", ({"a": "a", "b": "b"}, ["label"])),
        (ModelNames(AB, (("y",),), True), None, "a b y", ({"a": "a", "b": "b"}, ["y"])),
        (
            ModelNames(AB, (("y", "z"),)),
            None,
            "a b y z",
            ({"a": "a", "b": "b"}, {"y": "y", "z": "z"}),
        ),
        (ModelNames(AB, (("label",),)), None, "a b label", ({"a": "a", "b": "b"}, ["label"])),
        # By the layers' names, or by those of the dictionary they are in.
        (ModelNames((("in_1", "in_2"), ("b", "a"))), None, "a b", ({"b": "b", "a": "a"}, None)),
    ],
)
def test_columns_by_the_models_names(
    names: ModelNames, labels: Any, available: str, expected: Any
) -> None:
    assert by_name(names, labels, available.split()) == expected


@pytest.mark.parametrize(
    ("names", "available", "message"),
    [
        (
            ModelNames(),
            "a b",
            "'features'.*inputs.*'a', 'b'",
        ),
        (ModelNames(AB), "a c", "inputs 'a', 'b'.*'b'.*'a', 'c'"),
        (
            ModelNames((("a", "b"), ("b", "a"))),
            "a b",
            "inputs.*'a', 'b'.*'b', 'a'.*feature_cols",
        ),
        (
            ModelNames(AB, (("y",),)),
            "a b y label",
            "label_cols.*'y'.*'label'",
        ),
        (ModelNames(AB, (("y", "z"),)), "a b y", "outputs.*'y', 'z'.*'y'"),
        (
            ModelNames(AB, (("y",),), True),
            "a b",
            "loss.*outputs.*'y'.*'a', 'b'",
        ),
        (
            ModelNames(AB, (), True),
            "a b",
            "loss.*'a', 'b'",
        ),
        # The next value of a series, compared with this one?
        (ModelNames(AB, (("a",),), True), "a b", "output.*input.*'a'"),
        # A column that feeds the model is no label by convention.
        (
            ModelNames((("a", "label"),), (), True),
            "a label",
            "'a', 'label'.*'label'",
        ),
    ],
)
def test_names_that_do_not_tell_for_certain(
    names: ModelNames, available: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        by_name(names, None, available.split())


@pytest.mark.parametrize("value", [5, "EarlyStopping", None, {1: 2}, {"a"}])
def test_what_is_no_list_of_callbacks(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="callbacks.*list.*keras.callbacks"):
        ENGINE.check_callbacks(value)


def test_what_is_no_callback() -> None:
    for wrong in (5, int, "EarlyStopping", list):
        with pytest.raises(InvalidInputError, match="callbacks.*keras.call"):
            ENGINE.check_callbacks([wrong])


def test_callbacks_of_keras() -> None:
    keras: Any = pytest.importorskip("keras")

    class CustomCallback(keras.callbacks.EarlyStopping):
        pass

    for given in (
        (),
        [],
        [CustomCallback()],
        (keras.callbacks.Callback(),),
        CustomCallback(),
        list,
        CustomCallback,
    ):
        ENGINE.check_callbacks(given)
    with pytest.raises(InvalidInputError, match="callbacks.*EarlyStopping"):
        ENGINE.check_callbacks([keras.callbacks.EarlyStopping])


@pytest.mark.parametrize("value", [[int], int, "int", {1: int}, [("int", int)]])
def test_what_is_no_dictionary_of_objects(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="custom_objects.*dict"):
        check_objects(value)


def test_objects_by_name() -> None:
    assert check_objects(None) == {}
    assert check_objects({"int": int}) == {"int": int}


ARGUMENTS: dict[str, Any] = {
    "feature_cols": ["x"],
    "label_cols": ["y"],
    "sample_weight_col": "w",
    "validation": 0.25,
    "validation_freq": 2,
    "num_workers": 3,
    "gpus_per_worker": 1,
    "batch_size": 7,
    "epochs": 5,
    "steps_per_epoch": 11,
    "class_weight": {0: 2.0},
    "lr_scaling": "sqrt",
    "warmup_epochs": 1.5,
    "seed": 9,
    "shuffle": False,
    "callbacks": [print],
    "custom_objects": {"name": print},
    "initial_weights": InitialWeights("weights.keras", skip_mismatch=True),
    "run_dir": "runs/x",
    "resume": "required",
    "prediction_col": "scores",
    "stream_logs": False,
    "data": DataOptions(stratify="y"),
    "checkpoints": CheckpointOptions(every_steps=3),
    "restarts": RestartOptions(max_restarts=2),
    "launch": LaunchOptions(stall_timeout=60),
    "sync": Allreduce(compression="fp16"),
    "mlflow": MlflowOptions(experiment="digits"),
}


def test_every_argument_of_run_training_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list(inspect.signature(run_training).parameters.values())[2:]
    assert ARGUMENTS.keys() == {one.name for one in taken}
    assert all(ARGUMENTS[one.name] != one.default for one in taken)

    def stop(df: Any, config: TrainingConfig) -> None:
        raise InterruptedError(df, config)

    monkeypatch.setattr(api, "resolve", stop)
    with pytest.raises(InterruptedError) as caught:
        run_training("frame", "model", **ARGUMENTS)
    df, configuration = caught.value.args
    assert (df, configuration.model_fn) == ("frame", "model")
    for name, value in ARGUMENTS.items():
        home = configuration if hasattr(configuration, name) else configuration.fit
        assert getattr(home, name) == value, name
