"""Settings check themselves."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import HorovodRunner
from horovod_spark_runner.config import (
    AllreduceOptions,
    CheckpointOptions,
    FitOptions,
    LaunchOptions,
    RestartOptions,
)
from horovod_spark_runner.errors import InvalidInputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers must be a whole number of at least 1, got 0"),
        ({"num_workers": -2}, "num_workers"),
        ({"num_workers": 2.0}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"num_workers": 1, "gpus_per_worker": -1}, "gpus_per_worker"),
        ({"num_workers": 1, "start_timeout": float("nan")}, "start_timeout"),
        ({"num_workers": 1, "env": {"A": 1}}, r"env must map text to text, got \{'A': int\}"),
        ({"num_workers": 1, "mpi_parameters": {1: "a"}}, "mpi_parameters"),
    ],
)
def test_launch_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LaunchOptions(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"shuffle": "yes"}, "shuffle must be True or False, got 'yes'"),
        ({"shuffle": None}, "shuffle must be True or False, got None"),
        ({"lr_scaling": "linar"}, "lr_scaling must be one of none, linear, sqrt, got 'linar'"),
        ({"warmup_epochs": 2.0}, "needs lr_scaling"),
        ({"warmup_epochs": -1.0, "lr_scaling": "linear"}, "warmup_epochs"),
    ],
)
def test_fit_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        FitOptions(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "Ring"}, "allreduce algorithm must be one of"),
        ({"segment_bytes": 4096}, "applies to algorithm='segmented_ring' only"),
        ({"compression": "int8"}, "compression"),
        ({"cycle_ms": 0}, "cycle_ms"),
    ],
)
def test_allreduce_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        AllreduceOptions(**arguments)


def test_launch_options_pickle_and_do_not_change() -> None:
    env = {"A": "1"}
    options = LaunchOptions(2, env=env, allreduce=AllreduceOptions("ring"))
    env["A"] = "2"
    assert options.env["A"] == "1"
    assert pickle.loads(pickle.dumps(options)) == options


def test_numbers_of_numpy_become_plain() -> None:
    fit = FitOptions(
        batch_size=np.int64(8),
        seed=np.uint32(7),
        warmup_epochs=np.float32(0.5),
        lr_scaling="sqrt",
    )
    launch = LaunchOptions(np.int32(2), stall_timeout=np.float64(5), resources={"cpus": np.int8(1)})
    keep = CheckpointOptions(every_steps=np.int16(3), every_minutes=np.float32(0.5))
    restart = RestartOptions(np.int64(1), np.int64(1), np.float32(0.5))
    exchange = AllreduceOptions(fusion_bytes=np.int64(8), cycle_ms=np.float32(0.5))
    for settings in (fit, launch, keep, restart, exchange):
        for field in fields(settings):
            value = getattr(settings, field.name)
            assert "numpy" not in type(value).__module__, field.name
    assert (fit.batch_size, fit.seed, fit.warmup_epochs) == (8, 7, 0.5)
    json.dumps(asdict(fit))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "batch_size must be a whole number of at least 1, got None"),
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
    with pytest.raises(InvalidInputError, match="warmup_epochs must be a number, at least 0, got"):
        FitOptions(warmup_epochs=value, lr_scaling="sqrt")
    with pytest.raises(InvalidInputError, match="cycle_ms must be a number"):
        AllreduceOptions(cycle_ms=value)


def test_secrets_in_the_environment_are_not_shown() -> None:
    options = LaunchOptions(1, env={"TOKEN": "secret"})
    assert "secret" not in repr(options)
    with pytest.raises(InvalidInputError) as caught:
        LaunchOptions(1, env={"TOKEN": "secret", "N": 1})  # type: ignore[dict-item]
    assert "secret" not in str(caught.value)


def test_compression_is_for_trainings_only() -> None:
    with pytest.raises(InvalidInputError, match="compression='fp16' is for the gradients of"):
        HorovodRunner(1, allreduce=AllreduceOptions(compression="fp16"))
