"""The table of settings, and its copies: page, signatures, docstrings, Spark."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import pytest

import horovod_spark_runner
from horovod_spark_runner import HorovodRunner, TFTransformer, prepare_dataset, run_training
from horovod_spark_runner.commands.parameters import (
    EVERYDAY,
    OPTIONS,
    _described_arguments,
)
from horovod_spark_runner.config.data import DataOptions
from horovod_spark_runner.config.estimator import EstimatorSettings
from horovod_spark_runner.config.fields import Settings, default_of, kind_of, text_of
from horovod_spark_runner.config.launch import LaunchOptions, LaunchSettings
from horovod_spark_runner.config.prediction import PredictionSettings
from horovod_spark_runner.config.sync import STRATEGIES
from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.model.params import PredictionParams, _param_text, camel_case
from horovod_spark_runner.training.loop import SYNCHRONISERS

TAKEN = inspect.signature(run_training).parameters
# The log of a training goes into its run directory.
NOT_OF_TRAININGS = {"log_dir"}


def fields_of(cls: type[Settings]) -> dict[str, Any]:
    """Return the fields of a class that its bases have not."""
    inherited = {
        field.name
        for base in cls.__mro__[1:]
        if dataclasses.is_dataclass(base)
        for field in dataclasses.fields(base)
    }
    return {f.name: f for f in dataclasses.fields(cls) if f.name not in inherited}


TABLE = [
    pytest.param(field, id=f"{cls.__name__}.{name}")
    for cls in (*OPTIONS, *EVERYDAY, HorovodRunner, PredictionSettings, EstimatorSettings)
    for name, field in fields_of(cls).items()
]
EVERYDAY_FIELDS = {
    name: field
    for cls in EVERYDAY
    for name, field in fields_of(cls).items()
    if name not in NOT_OF_TRAININGS
}


def test_every_class_of_options_is_public_and_on_the_page() -> None:
    public = {
        thing
        for name in horovod_spark_runner.__all__
        if inspect.isclass(thing := getattr(horovod_spark_runner, name))
        and issubclass(thing, Settings)
    }
    assert public == {*OPTIONS, HorovodRunner}


def test_a_setting_has_one_name_and_one_home() -> None:
    homes: dict[str, list[str]] = {}
    for cls in (*OPTIONS, *EVERYDAY, HorovodRunner, PredictionSettings, EstimatorSettings):
        for name in fields_of(cls):
            homes.setdefault(name, []).append(cls.__name__)
    del homes["restarts"]  # a group of options, of functions as of trainings
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
    inside = {name for cls in OPTIONS for name in fields_of(cls)}
    assert inside.isdisjoint(TAKEN)


@pytest.mark.parametrize("name", EVERYDAY_FIELDS)
def test_run_training_takes_what_is_needed_every_day(name: str) -> None:
    field = EVERYDAY_FIELDS[name]
    assert TAKEN[name].default == default_of(field)
    assert TAKEN[name].annotation == field.type
    assert _described_arguments(run_training.__doc__ or "")[name] == text_of(field)


def test_run_training_says_something_of_every_argument() -> None:
    assert list(_described_arguments(run_training.__doc__ or "")) == list(TAKEN)


def test_datasets_of_functions_are_prepared_alike() -> None:
    table = fields_of(DataOptions)
    for name, parameter in inspect.signature(prepare_dataset).parameters.items():
        if name in table:
            default = default_of(table[name])
            assert parameter.default == (None if default == {} else default)


def test_a_runner_takes_all_of_launching() -> None:
    fields = {field.name for field in dataclasses.fields(HorovodRunner)}
    assert fields == {*fields_of(LaunchOptions), *fields_of(LaunchSettings), "restarts", "spark"}
    doc = inspect.getdoc(HorovodRunner) or ""
    assert "    stall_timeout: seconds without progress" in doc


@pytest.mark.parametrize("field", TABLE)
def test_each_setting_says_what_it_does_and_can_be(field: Any) -> None:
    text, kind = text_of(field), kind_of(field)
    assert text.endswith(".")
    assert kind.words
    if default_of(field) is dataclasses.MISSING:
        return
    default = kind.check(field.name, default_of(field))
    assert default == default_of(field)
    if kind.parse is not None and default is not None:
        assert kind.check(field.name, kind.parse(str(default))) == default


@pytest.mark.parametrize("field", fields_of(PredictionSettings).values(), ids=lambda f: f.name)
def test_a_model_has_a_param_and_an_argument_of_each_setting(field: Any) -> None:
    name = camel_case(field.name)
    param = getattr(PredictionParams, name)
    assert param.name == name
    assert param.doc == _param_text(text_of(field))
    for accessor in ("get", "set"):
        assert callable(getattr(PredictionParams, accessor + name[0].upper() + name[1:]))
    taken = inspect.signature(TFTransformer.from_run).parameters
    if field.name != "features_col":  # Spark ML's name for a list of one
        assert taken[field.name].default == default_of(field)
        assert taken[field.name].annotation == field.type


@pytest.mark.parametrize("field", TABLE)
def test_spark_can_hold_what_it_is_said_to(field: Any) -> None:
    from pyspark.ml.param import TypeConverters

    converter = getattr(TypeConverters, kind_of(field).converter)
    default = default_of(field)
    if not isinstance(default, Mapping) and default not in (None, dataclasses.MISSING):
        assert converter(default) == default
    if isinstance(default, float):
        assert math.isfinite(default)


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("False", False), ("yes", "yes"), ("", "")]
)
def test_flags_of_a_command_line(word: str, value: object) -> None:
    kind = kind_of(fields_of(FitOptions)["shuffle"])
    assert kind.parse is not None
    assert kind.parse(word) == value


def test_a_way_of_synchronising_is_named_wherever_one_is_looked_up() -> None:
    strategies = list(STRATEGIES.values())
    assert list(SYNCHRONISERS) == strategies
    assert [cls for cls in OPTIONS if cls in strategies] == strategies
    arguments = _described_arguments(inspect.getdoc(run_training) or "")
    for cls in strategies:
        assert cls.__name__ in horovod_spark_runner.__all__
        assert f"`{cls.__name__}`" in arguments["sync"]
