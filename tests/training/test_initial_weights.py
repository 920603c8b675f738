"""Weights to begin with that fit in part: taken by path, the rest as the model made them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from horovod_spark_runner.checkpoint.files import CheckpointInfo, save_checkpoint
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.training import InitialWeights
from horovod_spark_runner.engines.keras.engine import ENGINE
from horovod_spark_runner.engines.keras.loading import load_initial_weights
from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.frameworks import KERAS
from horovod_spark_runner.training import named_weights
from horovod_spark_runner.training.named_weights import match_names
from horovod_spark_runner.training.spec import WarmStart
from horovod_spark_runner.training.warm_start import read_warm_start
from tests.runs import variables_of

layers = keras.layers


def trained(classes: int = 10) -> Any:
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Normalization(name="scale"),
            layers.Dense(3, name="body"),
            layers.BatchNormalization(name="moments"),
            layers.Dropout(0.5),
            layers.Dense(classes, name="head"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.5), "mse")
    rng = np.random.default_rng(classes)
    model.fit(rng.normal(size=(8, 4)), rng.normal(size=(8, classes)), verbose=0)
    for weight in model.weights:
        weight.assign(rng.uniform(1, 2, weight.shape))
    return model


def save_run(model: Any, place: Path) -> None:
    variables = variables_of(model)
    info = CheckpointInfo(1, 1, [{}], "f", variables.describe(), KERAS)
    save_checkpoint(RunDirectory(str(place)), info, {"variables.npz": variables.capture()})


def found(place: Path, **given: Any) -> WarmStart:
    return read_warm_start(InitialWeights(place, **given), KERAS, ENGINE.weights_formats)


FORMS: dict[str, Callable[[Any, Path], None]] = {
    "run": save_run,
    "model.keras": lambda model, place: model.save(place),
    "model.weights.h5": lambda model, place: model.save_weights(place),
    "saved_model": lambda model, place: model.export(place, verbose=False),
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What the driver was told, and whether as a warning."""
    heard: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        named_weights, "notify", lambda text, *, warn=True: heard.append((text, warn))
    )
    return heard


def by_path(model: Any) -> dict[str, np.ndarray]:
    return {weight.path.partition("/")[2]: np.array(weight) for weight in model.weights}


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_a_new_head_keeps_its_initial_values(
    form: str, tmp_path: Path, told: list[tuple[str, bool]]
) -> None:
    source = trained()
    FORMS[form](source, tmp_path / form)
    model = trained(classes=7)
    before, rate = by_path(model), float(model.optimizer.learning_rate)
    model.optimizer.iterations.assign(0)
    model.optimizer.learning_rate = 0.25
    with pytest.raises(ModelError, match="model"):
        load_initial_weights(trained(classes=7), found(tmp_path / form))
    load_initial_weights(model, found(tmp_path / form, skip_mismatch=True))
    for path, value in by_path(model).items():
        expected = before if path.startswith("head/") else by_path(source)
        np.testing.assert_array_equal(value, expected[path], err_msg=path)
    ((text, warn),) = told
    assert warn
    assert re.search(rf"{len(before) - 2}\b.*\b{len(before)} weights", text)
    assert re.search("head/kernel.*3, 7", text)
    # Weights only: the rate and the steps are the new run's own.
    assert rate == 0.5
    assert float(model.optimizer.learning_rate) == 0.25
    assert int(model.optimizer.iterations) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_layers_follow_the_weights_they_are_given(form: str, tmp_path: Path) -> None:
    source, model = trained(), trained()
    FORMS[form](source, tmp_path / form)
    for weight in model.weights:
        weight.assign(np.full(weight.shape, 9.0))
    load_initial_weights(model, found(tmp_path / form))
    inputs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    source.get_layer("scale").finalize_state()
    np.testing.assert_array_equal(model(inputs), source(inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_which_none_fits_are_refused(form: str, tmp_path: Path) -> None:
    FORMS[form](trained(), tmp_path / form)
    other = keras.Sequential([layers.Input((5, 2)), layers.Conv1D(1, 1, name="strange")])
    other.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"strange/kernel.*there are .* \(4, 3\)"):
        load_initial_weights(other, found(tmp_path / form, skip_mismatch=True))


@pytest.mark.thorough
def test_optimizer_of_a_weights_file_stays_out(tmp_path: Path) -> None:
    source, model = trained(), trained()
    source.save_weights(tmp_path / "a.weights.h5")
    model.optimizer.learning_rate = 0.125
    moments = [np.array(v) for v in model.optimizer.variables]
    load_initial_weights(model, found(tmp_path / "a.weights.h5"))
    for variable, value in zip(model.optimizer.variables, moments, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_an_order_of_layers_does_not_matter_to_paths() -> None:
    assert match_names(["a/w", "b/w"], ["b/w", "c/w", "a/w"]) == {0: 2, 1: 0}
    assert match_names(["s/a/w", "s/b/w"], ["t/b/w", "t/x/w"]) == {1: 0}
    assert match_names(["s/a/w", "s/b/w"], ["b/w", "c/w"]) == {1: 0}
    assert match_names(["a/w", "s/a/w"], ["s/a/w"]) == {1: 0}
    # What occurs several times has no path of its own, unless there are equally many.
    assert match_names(["a/w", "a/w"], ["a/w"]) == {}
    assert match_names(["a/w", "a/w"], ["a/w", "a/w"]) == {0: 0, 1: 1}
