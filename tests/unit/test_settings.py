"""Validation of settings."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from horovod_spark_runner import (
    HorovodEstimator,
    HorovodRunner,
    TFTransformer,
    TorchModel,
    TorchTransformer,
    export_pipeline,
    plan_training,
    prepare_dataset,
    run_training,
    runner,
)
from horovod_spark_runner.config.data import DataOptions
from horovod_spark_runner.config.estimator import parse_strategy
from horovod_spark_runner.config.fields import derive
from horovod_spark_runner.config.keywords import _ADVICE
from horovod_spark_runner.config.launch import LaunchOptions, LaunchSettings, MpiOptions
from horovod_spark_runner.config.sync import (
    Allreduce,
    AsyncServer,
    DiLoCo,
    LocalSGD,
    Sync,
    check_sync,
    recorded_sync,
)
from horovod_spark_runner.config.training import (
    CheckpointOptions,
    FitOptions,
    RestartOptions,
    training_usage,
)
from horovod_spark_runner.config.validators import check_options
from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.tune import tune


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, r"num_workers.*\b1\b.*\b0"),
        ({"num_workers": -2}, "num_workers"),
        ({"num_workers": 2.0}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"num_workers": 1, "gpus_per_worker": -1}, "gpus_per_worker"),
        ({"num_workers": 1, "start_timeout": float("nan")}, "start_timeout"),
        ({"num_workers": 1, "env": {"A": 1}}, r"env\b.*\{'A': int\}"),
        ({"num_workers": 1, "env": ["A"]}, r"env\b.*\blist"),
        ({"heartbeat_timeout": 14}, r"heartbeat_timeout.*\b15\b.*\b14"),
        ({"share_gpus": "no"}, "share_gpus.*'no'"),
        ({"stream_logs": 2}, r"stream_logs.*\b2"),
        ({"log_dir": ""}, "log_dir.*URL"),
        ({"resources": {"cpus": 0}}, r"resources.*0\}"),
        (
            {"mpi": {"algorithm": "ring"}},
            r"mpi.*MpiOptions\(…\).*\bdict",
        ),
    ],
)
def test_launch_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LaunchSettings(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"shuffle": "yes"}, "shuffle.*'yes'"),
        ({"shuffle": None}, "shuffle.*None"),
        ({"lr_scaling": "linar"}, "lr_scaling.*none, linear, sqrt.*'linar'"),
        ({"warmup_epochs": 2.0}, "lr_scaling"),
        ({"warmup_epochs": -1.0, "lr_scaling": "linear"}, "warmup_epochs"),
    ],
)
def test_fit_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        FitOptions(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "Ring"}, "algorithm.*auto, ring"),
        ({"segment_bytes": 4096}, "algorithm='segmented_ring'"),
        ({"cycle_ms": 0}, r"cycle_ms.*\b0"),
        ({"network_interface": ""}, "network_interface.*''"),
        ({"parameters": {1: "a"}}, r"parameters.*\{1: str\}"),
    ],
)
def test_mpi_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        MpiOptions(**arguments)


def test_compression_is_a_choice() -> None:
    with pytest.raises(InvalidInputError, match="none, fp16, bf16, TopK.*'int8"):
        Allreduce(compression="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Allreduce()),
        ({"compression": "fp16"}, Allreduce(compression="fp16")),
        ({"way": "local_sgd", "every": 3}, LocalSGD(every=3)),
        ({"way": "diloco", "every": 9, "outer_momentum": 0}, DiLoCo(every=9, outer_momentum=0)),
        ({"way": "async_server", "servers": 1}, AsyncServer(servers=1)),
    ],
)
def test_a_way_of_synchronising_as_a_dictionary(values: dict[str, Any], expected: Sync) -> None:
    assert parse_strategy("sync", values) == expected
    assert recorded_sync(expected)["sync"] == values.get("way", "allreduce")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"way": "diloco"}, "sync=.*'every'"),
        (
            {"way": "gossip"},
            r"sync\['way'\].*'allreduce', 'local_sgd', 'dil",
        ),
        ({"way": ["diloco"]}, r"sync\['way'\].*\['diloco'\]"),
        (
            {"compression": {"way": ["top_k"]}},
            r"compression\['way'\].*'top_k', .*\['top_k'\]",
        ),
        (
            {"compression": {"way": "threshold", "start": 1e39}},
            r"start.*1e-30.*1e\+30.*1e\+39",
        ),
        (
            {"compression": {"way": "threshold", "start": 1e-46}},
            "start.*1e-30",
        ),
        ({"every": 3}, "'way'.*'local_sgd', 'diloco'"),
        ({"evry": 3}, "sync.*'evry'.*compression"),
        (
            {"way": "diloco", "every": 9, "outer_momentum": 1},
            r"outer_momentum.*\b1",
        ),
        ({"way": "diloco", "every": 9, "outer_lr": 0}, r"outer_lr.*\b0"),
        ({"way": "local_sgd", "every": 0}, "every"),
    ],
)
def test_a_way_of_synchronising_that_is_none(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_strategy("sync", values)


def test_a_way_of_synchronising_is_one_of_ours() -> None:
    assert check_sync("sync", None) == Allreduce()
    assert check_sync("sync", DiLoCo(every=9)) == DiLoCo(every=9)
    with pytest.raises(
        InvalidInputError, match=r"Allreduce\(…\).*LocalSGD\(…\).*DiLoCo\(…\).*AsyncServer"
    ):
        check_sync("sync", "local_sgd")


def test_launch_options_pickle_and_do_not_change() -> None:
    env = {"A": "1"}
    options = LaunchSettings(2, env=env, mpi=MpiOptions(algorithm="ring"))
    env["A"] = "2"
    assert options.env["A"] == "1"
    assert pickle.loads(pickle.dumps(options)) == options
    # What a slot is told is without what only the driver can use.
    with_resources = replace(options, resources={"cpus": 2})
    assert pickle.loads(pickle.dumps(with_resources)) == options
    for copied in (copy.copy(with_resources), copy.deepcopy({"launch": with_resources})["launch"]):
        assert copied == with_resources


def test_numbers_of_numpy_become_plain() -> None:
    fit = FitOptions(
        batch_size=np.int64(8),
        seed=np.uint32(7),
        warmup_epochs=np.float32(0.5),
        lr_scaling="sqrt",
    )
    launch = LaunchSettings(
        np.int32(2), stall_timeout=np.float64(5), resources={"cpus": np.int8(1)}
    )
    keep = CheckpointOptions(every_steps=np.int16(3), every_minutes=np.float32(0.5))
    restart = RestartOptions(
        max_restarts=np.int64(1), min_workers=np.int64(1), backoff_seconds=np.float32(0.5)
    )
    exchange = MpiOptions(fusion_bytes=np.int64(8), cycle_ms=np.float32(0.5))
    for settings in (fit, launch, keep, restart, exchange):
        for field in fields(settings):
            value = getattr(settings, field.name)
            assert "numpy" not in type(value).__module__, field.name
    assert (fit.batch_size, fit.seed, fit.warmup_epochs) == (8, 7, 0.5)
    json.dumps(asdict(fit))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"batch_size.*\b1\b.*None"),
        (1.0, "batch_size"),
        ("8", "batch_size"),
        (np.float64(8), "batch_size"),
        (np.bool_(True), "batch_size"),
        (np.array([8, 8]), "batch_size"),
    ],
)
def test_what_is_no_whole_number(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        FitOptions(batch_size=value)


@pytest.mark.parametrize("value", [True, "1", None, float("inf"), -1, 1 + 0j])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"warmup_epochs.*\b0\b"):
        FitOptions(warmup_epochs=value, lr_scaling="sqrt")
    with pytest.raises(InvalidInputError, match="cycle_ms.*milliseconds"):
        MpiOptions(cycle_ms=value)


def test_secrets_in_the_environment_are_not_shown() -> None:
    options = LaunchSettings(1, env={"TOKEN": "secret"})
    assert "secret" not in repr(options)
    with pytest.raises(InvalidInputError) as caught:
        LaunchSettings(1, env={"TOKEN": "secret", "N": 1})  # type: ignore[dict-item]
    assert "secret" not in str(caught.value)


def test_a_runner_is_its_settings() -> None:
    ours = HorovodRunner(2, stall_timeout=600, env={"TOKEN": "secret"})
    assert isinstance(ours, LaunchSettings)
    assert (ours.num_workers, ours.stall_timeout) == (2, 600.0)
    assert "secret" not in repr(ours)
    derived = derive(LaunchSettings, ours)
    assert type(derived) is LaunchSettings
    assert derived == LaunchSettings(2, stall_timeout=600, env={"TOKEN": "secret"})
    with pytest.raises(FrozenInstanceError):
        ours.num_workers = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        HorovodRunner(2, None)  # type: ignore[call-arg]


def test_the_folder_of_logs_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = MagicMock()
    monkeypatch.setattr(runner, "chosen_launcher", lambda: launcher)
    for folder, expected in (
        ("logs", f"{tmp_path}/logs"),
        ("s3://b/logs", "s3://b/logs"),
        (None, None),
    ):
        HorovodRunner(1, log_dir=folder, stream_logs=False).run(max, 1, 2)
        assert launcher.launch.call_args.args[1].log_dir == expected


def test_options_are_of_their_own_class() -> None:
    assert check_options("launch", None, LaunchOptions) == LaunchOptions()
    # It says how many ranks, which run_training asks for elsewhere.
    with pytest.raises(InvalidInputError, match=r"launch.*LaunchOptions\(…\).*Runner"):
        check_options("launch", HorovodRunner(3), LaunchOptions)


def test_epochs_to_validate_after_may_be_a_range() -> None:
    fit = FitOptions(validation_freq=range(2, 7, 2))
    assert [epoch for epoch in range(7) if fit.validates(epoch)] == [1, 3, 5]
    with pytest.raises(InvalidInputError, match="validation_freq"):
        FitOptions(validation_freq="12")  # type: ignore[arg-type]


def test_a_session_is_one_of_sparks() -> None:
    with pytest.raises(InvalidInputError, match="spark.*SparkSession.*'local'"):
        HorovodRunner(1, spark="local")


def test_settings_by_column_cannot_be_changed_afterwards() -> None:
    shapes: dict[str, Any] = {"image": (8, 8, 1)}
    options = DataOptions(shapes=shapes, transforms={"image": max})
    shapes["image"] = (1,)
    assert options.shapes == {"image": (8, 8, 1)}
    with pytest.raises(TypeError, match="does not support item assignment"):
        options.shapes["image"] = (1,)  # type: ignore[index]
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("call", "keyword", "message"),
    [
        (run_training, "shapes", r"data=DataOptions\(shapes="),
        (run_training, "max_restarts", r"restarts=RestartOptions\(max_restarts="),
        (run_training, "np", "num_workers="),
        (run_training, "use_gpu", "gpus_per_worker="),
        (run_training, "verbose", "stream_logs="),
        (run_training, "batch", "batch_size="),
        (run_training, "validation_split", "validation="),
        (run_training, "optimizer", "model_fn.*compile"),
        (run_training, "compression", r"sync=Allreduce\(compression="),
        (run_training, "staleness", r"sync=AsyncServer\(staleness="),
        (HorovodEstimator, "np", "numWorkers="),
        (HorovodEstimator, "store", "runDir="),
        (HorovodEstimator, "model", "modelFn="),
        (HorovodEstimator, "optimizer", "modelFn.*compile"),
        (HorovodEstimator, "sample_weight_col", "weightCol="),
        (HorovodEstimator, "validation", "validationFraction="),
        (HorovodEstimator, "feature_cols", "featureCols="),
        (HorovodEstimator, "compression", r"sync=Allreduce\(compression="),
        (HorovodEstimator, "max_restarts", r"restarts={'max_restarts'"),
        (HorovodEstimator, "epoch", "'epochs'"),
        (run_training, "epoch", "'epochs'"),
        (HorovodRunner, "np", "num_workers="),
        (HorovodRunner, "num_proc", "num_workers="),
        (HorovodRunner, "num_processes", "num_workers="),
        (HorovodRunner, "driver_log_verbosity", "stream_logs="),
        (HorovodRunner, "local_mode", r"local\[2\]"),
        (HorovodRunner, "shapes", r"run_training.*data=DataOptions\(shapes="),
        (HorovodRunner, "batch", "run_training.*batch_size="),
        (LaunchOptions, "epochs", "run_training.*epochs="),
        (LaunchOptions, "nothing_like_it", "stall_timeout"),
        (LaunchOptions, "nics", r"mpi=MpiOptions\(network_interface="),
        (run_training, "extra_mpi_args", r"launch=LaunchOptions\(mpi=MpiOptions\(parameters="),
        (run_training, "num_executors", "num_workers="),
        (run_training, "miniBatch", "batch_size="),
        (run_training, "inputCol", "feature_cols="),
        (run_training, "lr", "model_fn.*compile"),
        (run_training, "iters", "epochs.*steps_per_epoch"),
        (run_training, "num_ps", "AsyncServer"),
        (run_training, "inmemory_cache_all", r"data=DataOptions\(window_bytes="),
        (HorovodEstimator, "inputCol", "featuresCol="),
        (HorovodEstimator, "torchObj", "modelFn="),
        (HorovodEstimator, "cluster_size", "numWorkers="),
        (HorovodEstimator, "inmemory_cache_all", "data={'window_bytes'"),
        (HorovodEstimator, "checkpoint_callback", "runDir.*checkpoints={'every_steps'"),
        (HorovodRunner, "backend", "mpirun"),
        (tune, "np", "workers_per_trial="),
        (tune, "num_workers", "workers_per_trial="),
        (tune, "run_dir", "study_dir="),
        (tune, "n_trials", "max_trials="),
        (tune, "miniBatch", "batch_size="),
        (tune, "custom_objects", "run_training"),
        (prepare_dataset, "label_cols", "run_training.*label_cols="),
        (prepare_dataset, "feature_cols", "columns="),
        (prepare_dataset, "batch_size", "batch_size=.*Dataset.epoch"),
        (plan_training, "np", "num_workers="),
        (TorchModel, "model", "module="),
        (TorchModel, "criterion", "loss="),
        (TorchModel, "lr", "optimizer=.*partial"),
        (TorchModel, "epochs", "run_training.*epochs="),
        (TFTransformer.from_run, "store", "run_dir="),
        (TFTransformer.from_run, "batch_size", "predict_batch_size="),
        (TFTransformer.from_keras, "inputCol", "setFeaturesCol"),
        (TFTransformer.from_saved_model, "signature_def_key", "signature="),
        (TorchTransformer.from_module, "output_cols", "setPredictionCol"),
        (export_pipeline, "pth", "'path'"),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_right_one(
    call: Any, keyword: str, message: str
) -> None:
    needed = {"df": 1, "model_fn": 1, "space": 1} if call is tune else {}
    with pytest.raises(InvalidInputError, match=message) as caught:
        call(**needed, **{keyword: 1})
    assert repr(keyword) in str(caught.value)
    assert call.__name__ in str(caught.value)


def test_every_answer_names_arguments_of_run_training() -> None:
    usage = training_usage()
    assert {name for name, how in usage.items() if how == f"{name}=…"} == (
        inspect.signature(run_training).parameters.keys() - {"df"}
    )
    for names in _ADVICE:
        for name in names.split():
            with pytest.raises(InvalidInputError, match=f"'{name}'; "):
                TFTransformer.from_keras(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, -1])
def test_numbers_of_ranks_that_other_runners_take(number: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"num_workers.*{number}\b.*Spark.*local\[2\]"):
        HorovodRunner(number)


def test_a_call_that_does_not_fit_is_refused_on_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = MagicMock()
    monkeypatch.setattr(runner, "chosen_launcher", lambda: launcher)

    @functools.wraps(launcher_with_settings)
    def wrapper() -> None:
        launcher_with_settings({})

    one = HorovodRunner(1)
    for function, args, kwargs, message in (
        (lambda: 1, (1,), {}, "positional"),
        (lambda *, rate: rate, (), {"np": 2}, "'rate'"),
        (lambda rate: rate, (), {"args": (1,)}, "'args'|'rate'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            one.run(function, *args, **kwargs)
    assert not launcher.launch.called
    one.run(lambda function: function, function=1)
    one.run(wrapper)
    one.run(print, 1)
    assert launcher.launch.call_count == 3


def launcher_with_settings(settings: dict[str, Any]) -> None:
    """Take what a decorator passes."""
