"""What a finished model leaves behind, and what it takes to load it again."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.keras.artifact import adopt_model
from horovod_spark_runner.engines.keras.model import (
    build_model,
    keras_state,
    output_specs,
    using_keras_state,
)
from horovod_spark_runner.engines.keras.saved import ARCHIVE_FILE, KerasFacts
from horovod_spark_runner.errors import ModelError, RunDirectoryError
from horovod_spark_runner.model.load import _check_callable, read_finished_run, read_trained_model
from horovod_spark_runner.model.shipping import load_model
from horovod_spark_runner.storage.contents import Contents
from horovod_spark_runner.training.sample_rows import SAMPLE_FILE
from horovod_spark_runner.training.spec import ModelSource
from horovod_spark_runner.training.trained_model import WEIGHTS_FILE, read_model

from ..runs import save_run, source

X = Column("x", "float32", (3,))
VALUES = np.random.default_rng(0).random((7, 3)).astype(np.float32) + 50


def doubled(x: Any) -> Any:
    return keras.ops.tanh(x) * 2


class Shift(layers.Layer):
    """A layer with a weight of its own."""

    def __init__(self, by: float = 0.5, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.by = by

    def build(self, shape: Any) -> None:
        self.offset = self.add_weight(shape=(shape[-1],), initializer="ones", name="offset")

    def call(self, x: Any) -> Any:
        return x + self.offset * self.by

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "by": self.by}


@keras.saving.register_keras_serializable(package="mine")
class Registered(Shift):
    pass


class Counting(layers.Layer):
    """A layer that every call changes."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1)
        return x + self.calls


class Whole(keras.Model):
    """A subclass that answers predict in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data) * 10


class Generator(keras.Model):
    """A model that is trained by its own step and has no call."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)
        self.dense.build((None, 3))


def plain() -> Any:
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(1)])


def with_parts(*parts: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), *parts, layers.Dense(2)])


def compiled(model: Any, **arguments: Any) -> Any:
    model.compile("sgd", "mse", **arguments)
    if not model.built:
        model.predict(VALUES, verbose=0)
    return model


def adapted() -> Any:
    layer = layers.Normalization()
    layer.adapt(VALUES * [1, 5, 9])
    return with_parts(layer)


SELF_CONTAINED: dict[str, Callable[[], Any]] = {
    "plain": plain,
    "normalization": adapted,
    "several": lambda: two_outputs(list),
}
WITH_OBJECTS = {
    "layer": lambda: with_parts(Shift(0.25)),
    "registered": lambda: with_parts(Registered()),
    "activation": lambda: with_parts(layers.Dense(3, activation=doubled)),
    "function in Lambda": lambda: with_parts(layers.Lambda(doubled)),
    "lambda": lambda: with_parts(layers.Lambda(lambda x: keras.ops.abs(x) * 3)),
    "lambda that refers to a module": lambda: with_module(keras),
    "activation without a name": lambda: with_parts(layers.Dense(3, activation=anonymous())),
    "nested": lambda: with_parts(with_parts(Shift(name="inner")), layers.Lambda(lambda x: -x)),
}


def with_module(imported: Any) -> Any:
    return with_parts(layers.Lambda(lambda x: imported.ops.abs(x) * 3))


def anonymous() -> Any:
    return eval("lambda x: x * 3")


def two_outputs(kind: Any) -> Any:
    x = keras.Input((3,))
    a, b = layers.Dense(2, name="one")(x), layers.Dense(1, name="two")(x)
    return keras.Model(x, [a, b] if kind is list else {"z": a, "a": b})


def of_run(place: Path, **arguments: Any) -> Any:
    return load_model(read_finished_run(RunDirectory(str(place)), **arguments).recipe)


def never() -> Any:
    raise AssertionError("model_fn was called")


@pytest.mark.thorough
@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_keras_own_layers_need_no_code(name: str, tmp_path: Path) -> None:
    model = compiled(SELF_CONTAINED[name]())
    saved = save_run(tmp_path, model, [X])
    assert saved.loads == "archive"
    assert read_model(RunDirectory(str(tmp_path))).facts(KerasFacts).self_contained
    recipe = read_trained_model(RunDirectory(str(tmp_path)), source(never), saved, {}).recipe
    expected = model.predict(VALUES, verbose=0)
    expected = expected if isinstance(expected, list) else [expected]
    for predict in (load_model(recipe), of_run(tmp_path)):
        for ours, theirs in zip(predict({"x": VALUES}), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WITH_OBJECTS)
def test_the_users_own_parts_travel_in_memory(name: str, tmp_path: Path) -> None:
    model = compiled(WITH_OBJECTS[name]())
    saved = save_run(tmp_path, model, [X])
    assert saved.loads == "objects"
    directory = RunDirectory(str(tmp_path))
    recipe = read_trained_model(directory, source(never), saved, {}).recipe
    (ours,) = load_model(recipe)({"x": VALUES})
    np.testing.assert_allclose(ours, model.predict(VALUES, verbose=0), rtol=1e-5)
    # Storage holds no code: an earlier run's directory alone does not do.
    with pytest.raises(RunDirectoryError, match="Keras"):
        read_finished_run(directory)
    (again,) = of_run(tmp_path, model_fn=WITH_OBJECTS[name])({"x": VALUES})
    np.testing.assert_allclose(again, ours, rtol=1e-6)


def test_a_subclass_that_takes_no_arguments_of_keras_loads(tmp_path: Path) -> None:
    assert save_run(tmp_path, compiled(Whole()), [X]).loads == "objects"


def test_a_dictionary_of_outputs_keeps_its_authors_order_and_names(tmp_path: Path) -> None:
    model = compiled(two_outputs(dict))
    save_run(tmp_path, model, [X])
    recipe = read_finished_run(RunDirectory(str(tmp_path))).recipe
    assert [(o.name, o.shape) for o in recipe.outputs] == [("z", (2,)), ("a", (1,))]
    expected = model.predict(VALUES, verbose=0)
    for ours, name in zip(load_model(recipe)({"x": VALUES}), "za", strict=True):
        np.testing.assert_allclose(ours, expected[name], rtol=1e-5)


class Nesting(keras.Model):
    def call(self, x: Any) -> Any:
        return {"z": [x, {"k": x * 2}], "a": (x * 3, None), "Z_0": x * 4}


def test_nested_outputs_are_named_by_their_path() -> None:
    specs = output_specs(Nesting(), VALUES[:1])
    assert [spec.name for spec in specs] == ["z_0", "z_1_k", "a_0", "Z_0_1"]
    assert specs[1].path == ("z", 1, "k")


def test_outputs_of_one_layer_have_names_of_their_own() -> None:
    x = keras.Input((3,))
    y = layers.Dense(1, name="y")(x)
    specs = output_specs(keras.Model(x, [y, y]), VALUES[:1])
    assert [spec.name for spec in specs] == ["y", "y_1"]


def test_an_output_that_is_not_per_row_is_told(tmp_path: Path) -> None:
    class Sums(keras.Model):
        def call(self, x: Any) -> Any:
            return {"rows": x, "total": keras.ops.sum(x)}

    save_run(tmp_path, compiled(Sums()), [X])
    with pytest.raises(ModelError, match=r"'total'.*\(\).*\b8 rows"):
        _check_callable(read_finished_run(RunDirectory(str(tmp_path))))


def test_a_sparse_output_is_told(tmp_path: Path) -> None:
    class Sparse(keras.Model):
        def call(self, x: Any) -> Any:
            return tf.sparse.from_dense(x)

    save_run(tmp_path, compiled(Sparse()), [X])
    with pytest.raises(ModelError, match="SparseTensor.*dense"):
        _check_callable(read_finished_run(RunDirectory(str(tmp_path))))


def test_a_model_without_call_is_saved_and_told(tmp_path: Path) -> None:
    model = Generator()
    model.compile("sgd", "mse")
    saved = save_run(tmp_path, model, [X])
    assert saved.loads == "source"
    with np.load(tmp_path / "model" / "weights.npz") as file:
        assert file["00000"].shape == (3, 2)
    trained = read_finished_run(RunDirectory(str(tmp_path)))
    with pytest.raises(ModelError, match=r"NotImplementedError.*weights\.npz"):
        _check_callable(trained)


def fixed() -> Any:
    x = keras.Input(batch_shape=(4, 3))
    mean = keras.ops.mean(x, axis=1, keepdims=True)
    return keras.Model(x, layers.Dense(2)(keras.ops.reshape(x - mean, (4, 3))))


def eager() -> Any:
    return with_parts(Peeking())


class Peeking(layers.Layer):
    """Works without a graph only."""

    def call(self, x: Any) -> Any:
        return x * float(np.sign(x.numpy().sum())) if hasattr(x, "numpy") else x

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@pytest.mark.parametrize(("model_fn", "arguments"), [(fixed, {}), (eager, {"run_eagerly": True})])
def test_what_a_model_is_called_with_and_how(model_fn: Any, arguments: Any, tmp_path: Path) -> None:
    model = model_fn()
    model.compile("sgd", "mse", **arguments)
    saved = save_run(tmp_path, model, [X])
    recipe = read_trained_model(RunDirectory(str(tmp_path)), source(never), saved, {}).recipe
    predict = load_model(recipe)
    rows = np.concatenate([VALUES, VALUES[:1]])
    expected = np.concatenate([model(rows[:4]), model(rows[4:])])
    for count in (1, 4, 7):
        (ours,) = predict({"x": rows[:count]})
        np.testing.assert_allclose(ours, expected[:count], rtol=1e-5)


def half() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    keras.config.set_image_data_format("channels_first")
    return with_parts(Shift())


def test_settings_of_a_model_stay_its_own(tmp_path: Path) -> None:
    before = keras_state()
    with using_keras_state({**before, "dtype_policy": "mixed_float16"}):
        first = compiled(with_parts())
        save_run(tmp_path / "half", first, [X])
        expected = first.predict(VALUES, verbose=0)
    assert keras_state() == before
    (ours,) = of_run(tmp_path / "half")({"x": VALUES})
    np.testing.assert_allclose(ours, expected, rtol=1e-3)
    assert keras_state() == before
    built = compiled(with_parts(Shift()))
    save_run(tmp_path / "built", built, [X])
    of_run(tmp_path / "built", model_fn=half)({"x": VALUES})
    assert keras_state() == before


def test_weights_given_to_a_rebuilt_model_reach_what_is_derived_of_them(tmp_path: Path) -> None:
    """The rebuilt model's layer was never adapted."""
    model = compiled(adapted())
    save_run(tmp_path, model, [X])
    fresh = of_run(tmp_path, model_fn=lambda: with_parts(layers.Normalization()))
    np.testing.assert_allclose(fresh({"x": VALUES})[0], model.predict(VALUES, verbose=0), rtol=1e-5)


def test_another_model_fn_is_refused(tmp_path: Path) -> None:
    save_run(tmp_path, compiled(plain()), [X])
    with pytest.raises(ModelError, match=r"weight 2\b.*\(4, 2\).*\(4, 1\)"):
        of_run(tmp_path, model_fn=lambda: with_parts(layers.Dense(4)))


def test_custom_objects_by_the_name_of_the_class(tmp_path: Path) -> None:
    model = compiled(with_parts(Registered(), layers.Dense(2, activation=doubled)))
    save_run(tmp_path, model, [X])
    directory = RunDirectory(str(tmp_path))
    with pytest.raises(RunDirectoryError, match=r"custom_objects=\{'doubled': doubled\}"):
        read_finished_run(directory, custom_objects={"Registered": Registered})
    given = {"Registered": Registered, "doubled": doubled}
    (ours,) = of_run(tmp_path, custom_objects=given)({"x": VALUES})
    np.testing.assert_allclose(ours, model.predict(VALUES, verbose=0), rtol=1e-5)


def test_a_lambda_is_named_by_its_layer(tmp_path: Path) -> None:
    save_run(tmp_path, compiled(with_parts(layers.Lambda(lambda x: -x, name="minus"))), [X])
    with pytest.raises(RunDirectoryError, match="lambda.*'minus'.*model_fn"):
        read_finished_run(RunDirectory(str(tmp_path)))


def test_saving_a_model_does_not_change_it(tmp_path: Path) -> None:
    layer = Counting()
    model = compiled(with_parts(layer))
    calls = float(layer.calls.numpy())
    saved = save_run(tmp_path, model, [X])
    assert float(layer.calls.numpy()) == calls
    assert saved.loads == "objects"  # found to be the same model


@pytest.mark.parametrize("name", [ARCHIVE_FILE, WEIGHTS_FILE, SAMPLE_FILE, "signature.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_a_damaged_model_is_named_and_not_used(tmp_path: Path, name: str, damage: str) -> None:
    def model_fn() -> Any:
        return keras.Sequential([layers.Input((3,)), layers.Dense(2)])

    save_run(tmp_path, model_fn(), [X])
    directory = RunDirectory(str(tmp_path))
    file = tmp_path / "model" / name
    data = file.read_bytes()
    middle = len(data) // 2
    if damage == "flip":
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "cut":
        file.write_bytes(data[:middle])
    else:
        file.unlink()
    needs_source = name in (WEIGHTS_FILE, SAMPLE_FILE)
    with pytest.raises(RunDirectoryError, match=name.replace(".", r"\.")):
        read_finished_run(directory, model_fn=model_fn if needs_source else None)


def test_the_model_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        RunDirectory(str(tmp_path / name)).write_run_id(name)
        save_run(tmp_path / name, keras.Sequential([layers.Input((3,)), layers.Dense(2)]), [X])
    shutil.rmtree(tmp_path / "one" / "model")
    shutil.copytree(tmp_path / "other" / "model", tmp_path / "one" / "model")
    read_finished_run(RunDirectory(str(tmp_path / "other")))
    with pytest.raises(RunDirectoryError, match=r"\bother\b.*\bone\b"):
        read_finished_run(RunDirectory(str(tmp_path / "one")))


def test_damaged_metrics_are_named(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    assert directory.read_metrics() == []
    directory.write_metrics([{"loss": 1.0}, {"loss": 0.5}])
    assert directory.read_metrics() == [{"loss": 1.0}, {"loss": 0.5}]
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text()[:-3])
    assert directory.read_metrics() == [{"loss": 1.0}], "the last line was cut short"
    file.write_text("{" + file.read_text())
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl"):
        directory.read_metrics()
    directory.write_metrics([{"loss": 1.0}, {"loss": 0.5}])
    first, last = file.read_text().splitlines(keepends=True)
    for lines in (first + last + last, last, first + first):
        file.write_text(lines)
        with pytest.raises(RunDirectoryError, match="epoch.*number"):
            directory.read_metrics()


def test_a_folder_of_runs_names_one(tmp_path: Path) -> None:
    for name in ("run-1", "run-2"):
        (tmp_path / name).mkdir()
        RunDirectory(str(tmp_path / name)).write_run_id("x")
    with pytest.raises(RunDirectoryError, match=f"name one of them.*{tmp_path}/run-2"):
        read_model(RunDirectory(str(tmp_path)))


class Unwritable(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without get_config, as many tutorials have it."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


def test_a_schedule_that_keras_cannot_write_costs_no_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = keras.Sequential([keras.Input(X.shape), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(Unwritable()), "mse")
    assert save_run(tmp_path, model, [X]).loads == "archive"
    assert "Unwritable" in caplog.text


def test_a_model_file_that_keras_cannot_load_is_refused(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.keras", tmp_path / "broken.keras"
    keras.Sequential([keras.Input(X.shape), keras.layers.Dense(7)]).save(whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(broken, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, content.replace(b'"units": 7', b'"units": "many"'))
    with pytest.raises(ModelError, match="cannot load the model file.*custom_objects"):
        adopt_model(RunDirectory(str(tmp_path / "run")), broken, None, {})
    with pytest.raises(ModelError, match="cannot load the model file.*custom_objects"):
        build_model(ModelSource(file=Contents(broken.read_bytes())))
