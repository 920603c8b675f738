"""Settings check themselves."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from horovod_spark_runner.config import AllreduceOptions, FitOptions, LaunchOptions
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
        ({"num_workers": 1, "env": {"A": 1}}, "env must map text to text"),
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
