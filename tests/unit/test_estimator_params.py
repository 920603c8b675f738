"""`HorovodEstimator`'s Params: the table of settings, validated when set, stored as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any, cast

import cloudpickle
import pytest
from pyspark.ml.tuning import ParamGridBuilder

from horovod_spark_runner import (
    DataError,
    DataOptions,
    HorovodEstimator,
    InvalidInputError,
    LaunchOptions,
    MpiOptions,
    run_training,
)
from horovod_spark_runner.config.estimator import EstimatorSettings, parse_options
from horovod_spark_runner.config.fields import Settings, default_of, text_of
from horovod_spark_runner.config.importable import (
    _CodeName,
    by_import_name,
    from_storage,
    import_name,
)
from horovod_spark_runner.config.launch import LaunchSettings
from horovod_spark_runner.config.prediction import PredictionSettings
from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.estimator import _describe_map
from horovod_spark_runner.model.params import _param_text, camel_case
from horovod_spark_runner.model.persistence import savable

# Of launching, what `run_training` takes one by one too.
LAUNCHING = ("num_workers", "gpus_per_worker", "stream_logs")
TABLE = [
    pytest.param(field, id=camel_case(field.name))
    for cls in (EstimatorSettings, FitOptions, LaunchSettings, PredictionSettings)
    for field in dataclasses.fields(cls)
    if cls is not LaunchSettings or field.name in LAUNCHING
]


def make_model(units: int = 8, rate: float = 0.1) -> Any:
    raise NotImplementedError


def make_transform(value: Any, generator: Any) -> Any:
    return value


class Outer:
    @staticmethod
    def make() -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("field", TABLE)
def test_each_setting_has_a_param_a_getter_and_a_setter(field: Any) -> None:
    estimator, name = HorovodEstimator(), camel_case(field.name)
    param = estimator.getParam(name)
    assert param.doc == _param_text(text_of(field))
    # Other settings are called as Params are.
    assert all(map(estimator.hasParam, re.findall(r"\b[a-z]+(?:[A-Z][a-z]+)+\b", param.doc)))
    assert not re.search(r"\b[a-z]+_(?:cols?|workers)\b", param.doc)
    default = "features" if name == "featuresCol" else default_of(field)
    assert estimator.getOrDefault(name) == default
    title = name[0].upper() + name[1:]
    assert getattr(estimator, f"get{title}")() == default
    assert callable(getattr(estimator, f"set{title}"))
    json.dumps(estimator.getOrDefault(name))


def test_there_are_no_other_params() -> None:
    names = {param.values[0].name for param in TABLE}  # type: ignore[union-attr]
    assert {param.name for param in HorovodEstimator().params} == set(map(camel_case, names))
    for name in names:
        assert f"{camel_case(name)}: " in HorovodEstimator().explainParams()


def test_run_training_has_no_setting_that_the_estimator_lacks() -> None:
    import inspect

    taken = set(inspect.signature(run_training).parameters)
    otherwise = {
        "df": "the argument of fit",
        "sample_weight_col": "weightCol",
        "validation": "validationIndicatorCol",
        "resume": "resumeFrom",
    }
    params = {param.name for param in HorovodEstimator().params}
    assert {camel_case(name) for name in taken - set(otherwise)} <= params


def test_maps_give_what_setters_give() -> None:
    """Spark converts what a map holds, too: a whole number may come as 2.0, as of a grid."""
    estimator = HorovodEstimator()
    copied = estimator.copy({estimator.epochs: 2.0, estimator.classWeight: {True: 3, False: 1}})
    assert repr(copied.getEpochs()) == "2"
    assert repr(copied.getClassWeight()) == repr({1: 3.0, 0: 1.0})
    assert repr(estimator.setEpochs(3.0).getEpochs()) == "3"
    with pytest.raises(InvalidInputError, match=r"epochs.*2\.5"):
        estimator.copy({estimator.epochs: 2.5})


def test_setters_return_the_estimator_and_none_takes_back() -> None:
    estimator = HorovodEstimator(epochs=3).setEpochs(4).setLabelCol("y").setWeightCol("w")
    assert (estimator.getEpochs(), estimator.getLabelCol(), estimator.getWeightCol()) == (
        4,
        "y",
        "w",
    )
    assert estimator.setEpochs(None).getEpochs() == 1
    assert estimator.setParams(batchSize=5, weightCol=None).getBatchSize() == 5
    assert estimator.getWeightCol() is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epoch": 3}, "HorovodEstimator.*'epoch'.*'epochs"),
        ({"zzz": 3}, "'zzz'.*batchSize, "),
        # As `run_training` calls them.
        ({"sample_weight_col": "w"}, "'sample_weight_col'.*weightCol"),
        ({"allow_nan": True}, "'allow_nan'.*data={'allow_nan': …}.?$"),
        ({"epochs": 0}, r"epochs.*\b1\b.*\b0"),
        ({"batchSize": "32"}, "batchSize"),
        ({"labelCols": 3}, "labelCols.*list.*dict"),
        # Of what is long, the beginning.
        ({"labelCol": [0.25] * 999}, r"labelCol\b.*\[0\.25[0-9., ]{150,200}…$"),
        ({"modelFn": 3}, "modelFn.*function"),
        ({"modelArgs": [1]}, "modelArgs.*dict"),
        (
            {"modelArgs": {"x": {"y": {1}}}},
            r"modelArgs\['x'\]\['y'\]",
        ),
        ({"modelArgs": {"loss": len}}, r"modelArgs\['loss'\].*modelFn"),
        ({"modelArgs": {"x": float("nan")}}, r"modelArgs\['x'\].*finite"),
        ({"callbacks": 3}, "callbacks.*function"),
        ({"customObjects": {"x": 3}}, r"customObjects\['x'\].*function"),
        ({"validationFraction": 1.5}, r"validationFraction.*\b0\b.*\b1"),
        ({"data": {"shape": {}}}, "data.*'shape'.*shapes, dtypes"),
        ({"data": LaunchOptions()}, r"data.*DataOptions\(…\).*dict"),
        ({"launch": {"mpi": {"algorithm": "x"}}}, "algorithm.*auto, ring"),
        ({"launch": {"mpi": {"ring": 1}}}, r"launch\['mpi'\].*'ring'"),
        ({"data": {"transforms": {"x": 3}}}, r"transforms.*'x'.*\b3"),
        ({"runDir": ""}, "runDir"),
        ({"numWorkers": 0}, "numWorkers"),
        ({"classWeight": {1.5: 2.0}}, "classWeight"),
    ],
)
def test_wrong_params_are_refused_when_they_are_given(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        HorovodEstimator(**params)


def test_options_are_kept_as_json_and_made_again() -> None:
    original = DataOptions(shapes={"x": (8, 8, 1)}, window_bytes=5, allow_nan=True)
    estimator = HorovodEstimator(
        data=original, launch=LaunchOptions(mpi=MpiOptions(algorithm="ring"), env={"A": "B"})
    )
    stored = json.loads(
        json.dumps({name: estimator.getOrDefault(name) for name in ("data", "launch")})
    )
    assert stored == {
        "data": {"shapes": {"x": [8, 8, 1]}, "window_bytes": 5, "allow_nan": True},
        "launch": {"mpi": {"algorithm": "ring"}, "env": {"A": "B"}},
    }
    assert parse_options(DataOptions, "data", stored["data"]) == original
    restored = HorovodEstimator(**stored).getLaunch()
    assert restored == stored["launch"]
    again: Settings = parse_options(LaunchOptions, "launch", restored)
    assert again == LaunchOptions(mpi=MpiOptions(algorithm="ring"), env={"A": "B"})


def test_numbers_of_numpy_become_plain_ones() -> None:
    import numpy as np

    arguments = {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True), "d": (1, [None])}
    class_weight = {np.int64(-1): np.float32(3), np.int64(1): np.float32(2)}
    estimator = HorovodEstimator(modelArgs=arguments, classWeight=class_weight)
    assert json.dumps(estimator.getModelArgs()) == '{"a": 3, "b": 0.5, "c": true, "d": [1, [null]]}'
    # The keys of JSON are text.
    weights = json.loads(json.dumps(estimator.getClassWeight()))
    assert HorovodEstimator(classWeight=weights).getClassWeight() == {-1: 3.0, 1: 2.0}


def test_code_has_an_import_name_where_another_process_can_import_it() -> None:
    name = f"{__name__}:make_model"
    assert import_name(make_model) == name
    assert by_import_name("modelFn", _CodeName(name)) is make_model
    assert by_import_name("modelFn", _CodeName(f"{__name__}:Outer.make")) is Outer.make
    assert import_name(lambda: 3) is None

    def inner() -> None: ...

    assert import_name(inner) is None
    with pytest.raises(InvalidInputError, match="modelFn='no.such:thing'"):
        by_import_name("modelFn", _CodeName("no.such:thing"))
    transform = {"transforms": {"x": make_transform}}
    stored = savable("data", HorovodEstimator(data=transform).getData())
    assert stored == {"transforms": {"x": f"{__name__}:make_transform"}}
    loaded = HorovodEstimator(data=stored).getData()
    assert parse_options(DataOptions, "data", loaded).transforms == {"x": make_transform}


def test_a_name_from_storage_is_not_imported(tmp_path: Path) -> None:
    estimator = HorovodEstimator(modelFn="os:system", modelArgs={"command": f"touch {tmp_path}/x"})
    (name,) = ParamGridBuilder().addGrid(estimator.modelFn, ["os:system"]).build()[0].values()
    for marked in (estimator.getModelFn(), name, pickle.loads(pickle.dumps(name))):
        assert by_import_name("modelFn", marked) is os.system
        with pytest.raises(InvalidInputError, match="modelFn=.os:system.*storage.*setModelFn"):
            by_import_name("modelFn", from_storage(marked))
    estimator._paramMap[estimator.modelFn] = from_storage(estimator.getModelFn())
    with pytest.raises(InvalidInputError, match="storage"):
        estimator.copy()._build()
    loaded = HorovodEstimator()
    loaded._defaultParamMap[loaded.modelFn] = "os:system"
    with pytest.raises(InvalidInputError, match="storage"):
        loaded.copy({loaded.epochs: 1})._build()
    with pytest.raises(InvalidInputError, match="storage"):
        loaded.copy({loaded.modelFn: "os:system"})._build()
    assert estimator.setModelFn(make_model).setModelArgs(None)._build() is make_model
    assert not (tmp_path / "x").exists()
    for runs_code in ({"env": {"LD_PRELOAD": "x"}}, {"mpi": {"parameters": {"mca_path": "x"}}}):
        marked = HorovodEstimator(launch=runs_code).copy().getLaunch()
        assert parse_options(LaunchOptions, "launch", pickle.loads(pickle.dumps(marked)))
        with pytest.raises(InvalidInputError, match="launch.*storage.*(LD_PRELOAD|mca_path)"):
            parse_options(LaunchOptions, "launch", from_storage(marked))


def test_all_code_that_a_loaded_estimator_lacks_is_named_at_once() -> None:
    names = {one: f"lib:{one}" for one in ("make", "layer", "tell", "scale")}
    loaded = HorovodEstimator()
    for name, value in {
        "modelFn": names["make"],
        "customObjects": {"L": names["layer"]},
        "callbacks": names["tell"],
        "data": {"transforms": {"x": names["scale"]}},
    }.items():
        loaded._paramMap[loaded.getParam(name)] = value
    with pytest.raises(InvalidInputError) as caught:
        loaded.fit(cast(Any, None))
    message = str(caught.value)
    assert all(name in message for name in names.values())
    setters = ("setModelFn", "setCustomObjects", "setCallbacks", "setData")
    assert all(one in message for one in setters)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("modelFn", lambda: 3, "modelFn.*<lambda>.*model"),
        (
            "callbacks",
            [object()],
            r"callbacks\[0\].*\bobject",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        savable(name, value)


def test_a_copy_is_independent() -> None:
    estimator = HorovodEstimator(modelFn=make_model, epochs=3, modelArgs={"units": 4})
    copied = estimator.copy({estimator.epochs: 5, HorovodEstimator().epochs: 9})
    assert (copied.getEpochs(), estimator.getEpochs()) == (5, 3)
    assert copied.uid == estimator.uid
    assert copied.setModelArgs({"units": 8}).getModelArgs() != estimator.getModelArgs()
    again = pickle.loads(pickle.dumps(copied))
    assert again.getEpochs() == 5
    assert again.getModelFn() is make_model
    # Also what a getter returned, be it a default or within what was set.
    plain = HorovodEstimator(callbacks=None, data={"shapes": {"x": [2]}})
    changed = plain.copy()
    changed.getModelArgs()["units"] = 9
    changed.getData()["shapes"]["x"].append(3)
    assert plain.getModelArgs() == HorovodEstimator().getModelArgs() == {}
    assert plain.getData() == {"shapes": {"x": [2]}}


def test_a_grid_is_of_plain_params() -> None:
    estimator = HorovodEstimator()
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2])
    grid = grid.addGrid(estimator.modelArgs, [{"units": 4}, {"units": 8}])
    copies = [estimator.copy(one) for one in grid.build()]
    assert [(one.getEpochs(), one.getModelArgs()["units"]) for one in copies] == [
        *((1, 4), (1, 8), (2, 4), (2, 8))
    ]


def test_a_single_column_needs_no_list() -> None:
    estimator = HorovodEstimator(featureCols="x", labelCols="y")
    assert (estimator.getFeatureCols(), estimator.getLabelCols()) == (["x"], ["y"])


def test_grids_name_functions_so_that_they_can_be_saved() -> None:
    estimator = HorovodEstimator(modelFn=make_model)
    builder = ParamGridBuilder().addGrid(estimator.modelFn, [make_model, Outer.make, len])
    builder.addGrid(estimator.customObjects, [{"Outer": Outer}])
    builder.addGrid(estimator.data, [{"transforms": {"x": make_transform}}])
    maps = builder.build()
    json.dumps([list(one.values()) for one in maps])
    assert [one[estimator.modelFn] for one in maps] == [
        f"{__name__}:make_model",
        f"{__name__}:Outer.make",
        "builtins:len",
    ]
    assert maps[0][estimator.customObjects] == {"Outer": f"{__name__}:Outer"}
    # A stage keeps functions as they were given.
    assert estimator.getModelFn() is make_model
    assert estimator.copy(maps[1]).getModelFn() == f"{__name__}:Outer.make"


def test_code_of_a_script_is_saved_by_the_name_it_has_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a notebook, where a name may come to mean another function than a grid was given."""
    main = sys.modules["__main__"]
    before: dict[str, Any] = {}
    exec("def build(): return 'before'", {"__name__": "__main__"}, before)
    monkeypatch.setattr(main, "build", before["build"], raising=False)
    estimator = HorovodEstimator(modelFn=before["build"])
    (one,) = ParamGridBuilder().addGrid(estimator.modelFn, [before["build"]]).build()
    assert json.dumps(list(one.values())) == '["__main__:build"]'
    assert savable("modelFn", estimator.getModelFn()) == "__main__:build"
    assert import_name(before["build"]) is None

    monkeypatch.setattr(main, "build", lambda: "after")
    name = estimator.copy(one).getModelFn()
    for stored in (name, pickle.loads(cloudpickle.dumps(name))):
        assert by_import_name("modelFn", stored)() == "before"
    assert by_import_name("modelFn", _CodeName(json.loads(json.dumps(name))))() == "after"
    monkeypatch.delattr(main, "build")
    with pytest.raises(InvalidInputError, match="script.*notebook"):
        by_import_name("modelFn", _CodeName("__main__:build"))


def test_a_search_over_what_has_no_name_is_told_at_its_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    estimator, nothing = HorovodEstimator(modelFn=make_model), cast(Any, None)
    grid = ParamGridBuilder().addGrid(estimator.modelFn, [make_model, lambda: make_model(4)])
    grid.addGrid(estimator.data, [{"transforms": {"x": lambda value, generator: value}}])
    with pytest.raises(DataError, match="Spark DataFrame"):
        estimator.fitMultiple(nothing, grid.build())
    named = {record.getMessage().split()[0] for record in caplog.records}
    assert named == {"modelFn", "data"}
    assert "bestModel" in caplog.text
    caplog.clear()
    with pytest.raises(DataError):
        estimator.fitMultiple(nothing, [{estimator.epochs: 2}])
    assert not caplog.records


def test_maps_that_would_have_no_effect_are_refused() -> None:
    estimator, other = HorovodEstimator(), HorovodEstimator()
    nothing: Any = None
    with pytest.raises(InvalidInputError, match="batchSize.*class"):
        estimator.fit(nothing, {HorovodEstimator.batchSize: 3})
    with pytest.raises(InvalidInputError, match="batchSize.*class"):
        estimator.copy({HorovodEstimator.batchSize: 3})
    with pytest.raises(InvalidInputError, match=r"\{stage.epochs: …\}"):
        estimator.fit(nothing, {"epochs": 3})
    with pytest.raises(InvalidInputError, match="'epochs'.*Param"):
        estimator.copy({"epochs": 3})
    with pytest.raises(InvalidInputError, match=f"{other.uid}__epochs.*stage"):
        estimator.fit(nothing, {other.epochs: 3})
    with pytest.raises(InvalidInputError, match=r"Param.*\b3"):
        estimator.fitMultiple(nothing, [3])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match="params.*map"):
        estimator.fit(nothing, 3)


def test_a_map_is_described_by_its_values() -> None:
    stage = HorovodEstimator()
    params: dict[Any, Any] = {
        stage.modelArgs: {"units": 8, "rate": 0.5},
        stage.validationIndicatorCol: "fold0",
    }
    assert _describe_map(params) == "units=8, rate=0.5, validationIndicatorCol='fold0'"
    assert _describe_map({}) == ""


def test_values_of_environment_variables_are_neither_shown_nor_saved() -> None:
    estimator = HorovodEstimator(launch={"env": {"TOKEN": "hunter2"}})
    assert "hunter2" not in estimator.explainParams()
    assert "TOKEN" in estimator.explainParams()
    assert savable("launch", estimator.getLaunch()) == {"env": {"TOKEN": ""}}
    options: LaunchOptions = parse_options(LaunchOptions, "launch", estimator.getLaunch())
    assert options.env == {"TOKEN": "hunter2"}
    saved = json.loads(json.dumps(savable("launch", estimator.getLaunch())))
    with pytest.raises(InvalidInputError, match=r"TOKEN.*setLaunch"):
        parse_options(LaunchOptions, "launch", saved)


@pytest.mark.parametrize("env", [{"A=B": "C"}, {"A": "B\0C"}, {"": "A"}])
def test_environment_variables_that_cannot_be_set_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="env.*'='.*NUL"):
        LaunchOptions(env=env)
