"""What a training was asked for is checked before anything is done, without Spark or Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.config import (
    CheckpointOptions,
    FitOptions,
    LaunchOptions,
    RestartOptions,
)
from horovod_spark_runner.data.prepare.datasets import DataOptions
from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.run.pipeline import TrainingRequest
from horovod_spark_runner.training.keras.source import check_given_callbacks
from horovod_spark_runner.training.spec import check_objects


def request(**given: Any) -> TrainingRequest:
    return TrainingRequest(
        **{
            "frame": None,
            "model": len,
            "custom_objects": None,
            "feature_cols": ["a"],
            "label_cols": ["y"],
            "sample_weight_col": None,
            "data": DataOptions(),
            "launching": LaunchOptions(num_workers=1),
            "fit": FitOptions(),
            "callbacks": (),
            "run_dir": None,
            "resume": "auto",
            "initial_weights": None,
            "skip_mismatch": False,
            "checkpoints": CheckpointOptions(),
            "restarts": RestartOptions(),
            "prediction_col": None,
            **given,
        }
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run_dir": ""}, "run_dir is empty; give a folder or URL"),
        ({"skip_mismatch": True}, "initial_weights_skip_mismatch=True needs initial_weights"),
        (
            {"skip_mismatch": "yes", "initial_weights": "run"},
            "initial_weights_skip_mismatch must be True or False, got 'yes'",
        ),
    ],
)
def test_requests_that_cannot_be_meant(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        request(**given)


def test_requests_that_can() -> None:
    assert request(run_dir="run").run_dir == "run"
    assert request(skip_mismatch=np.True_, initial_weights="run").initial_weights == "run"


@pytest.mark.parametrize("given", [5, "EarlyStopping", None, {1: 2}, {"a"}])
def test_what_is_no_list_of_callbacks(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="callbacks must be a list of keras.callbacks"):
        check_given_callbacks(given)


def test_what_is_no_callback() -> None:
    for wrong in (5, int, "EarlyStopping", list):
        with pytest.raises(InvalidInputError, match="callbacks holds .*, which is no keras.call"):
            check_given_callbacks([wrong])


def test_callbacks_of_keras() -> None:
    keras = pytest.importorskip("keras")

    class Own(keras.callbacks.EarlyStopping):  # type: ignore[misc]
        pass

    for given in ((), [], [Own()], (keras.callbacks.Callback(),), Own(), list, Own):
        check_given_callbacks(given)
    with pytest.raises(InvalidInputError, match="callbacks holds .*EarlyStopping"):
        check_given_callbacks([keras.callbacks.EarlyStopping])


@pytest.mark.parametrize("given", [[int], int, "int", {1: int}, [("int", int)]])
def test_what_is_no_dictionary_of_objects(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="custom_objects must be a dictionary"):
        check_objects(given)


def test_objects_by_name() -> None:
    assert check_objects(None) == {}
    assert check_objects({"int": int}) == {"int": int}
